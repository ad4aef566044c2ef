"""Messages that would take long to parse are refused before that; every valid request is accepted."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as pb
from quire.v1 import replica_pb2
from quire.v1.generation_pb2_grpc import GenerationServicer, GenerationStub, add_GenerationServicer_to_server
from quire.v1.replica_pb2_grpc import ReplicaStub
from scheduler.identity.permissions import METHODS
from scheduler.requests.limits import RequestLimits
from scheduler.requests.status import BadMessage
from scheduler.servers import bounded_messages
from scheduler.servers.bounded_messages import MAX_TOKEN_IDS, BoundedMessages, check_cost
from scheduler.servers.grpc_server import GENERATE
from scheduler.servers.read_requests import ReadRequests
from scheduler.servers.request_places import RequestPlaces
from scheduler.telemetry.limits import MESSAGE_FIELDS
from tests.scheduler.servers.test_grpc_access import ADMIN as METHODS_OF_ADMIN
from tests.scheduler.servers.test_grpc_access import PUBLIC as METHODS_OF_PUBLIC
from tests.support.scheduler.limits import counted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.scheduler.servers import Servers

MIB = 1 << 20


def number(value: int) -> bytes:
    """Encodes a varint."""
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + number(value >> 7)


def field(tag: int, payload: bytes) -> bytes:
    """Encodes a field with a length."""
    return number(tag << 3 | 2) + number(len(payload)) + payload


COSTLY = {
    "empty chat messages": field(4, b"\x0a\x00" * MIB),
    "one message with many roles": field(4, field(1, b"\x0a\x00" * MIB)),
    "many request ids": b"\x0a\x00" * MIB,
    "many chats": field(4, b"") * MIB,
    "unknown numbers": b"\xa0\x06\x01" * MIB,
    "unknown texts": b"\xa2\x06\x00" * MIB,
    "unknown fixed numbers": b"\xa5\x06abcd" * (MIB // 2),
    "ids without packing": field(3, b"\x08\x01" * MIB),
    "too many ids": field(3, field(1, b"\x01" * (MAX_TOKEN_IDS + 1))),
    "stop strings": field(6, b"\x1a\x00" * MIB),
    "biases": field(5, field(11, b"\x08\x01") * (MIB // 2)),
    "allowed ids": field(5, field(12, b"\x01" * (MAX_TOKEN_IDS + 1))),
}


@pytest.mark.parametrize("data", COSTLY.values(), ids=COSTLY)
def test_costly_messages_are_refused(data: bytes) -> None:
    assert pb.GenerateRequest.FromString(data) is not None, "protobuf accepts it"
    with pytest.raises(BadMessage, match="more than"):
        check_cost(data)


@pytest.mark.parametrize("start", [b"\xa3\x06\xa4\x06", b"\x23\x24"], ids=["unknown group", "group for a message"])
def test_groups_do_not_hide_the_fields_behind_them(start: bytes) -> None:
    data = start + COSTLY["empty chat messages"]
    assert len(pb.GenerateRequest.FromString(data).chat.messages) == MIB, "protobuf skips the group"
    with pytest.raises(BadMessage, match="group"):
        check_cost(data)


def test_the_largest_valid_requests_are_accepted() -> None:
    limits = RequestLimits()
    message = pb.ChatMessage(role="user", content="a" * 1000)
    call = pb.ToolCall(id="call_1", name="look", arguments="{}")
    turn = [
        pb.ChatMessage(role="assistant", content="a", reasoning_content="a", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="a", tool_call_id="call_1", name="look"),
    ]
    for prompt in (
        pb.GenerateRequest(text="a" * limits.max_prompt_bytes),
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message] * limits.max_chat_messages)),
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=turn * (limits.max_chat_messages // 2))),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70_000] * MAX_TOKEN_IDS)),
    ):
        prompt.sampling.logit_bias.update(dict.fromkeys(range(limits.max_num_logit_bias), 1.0))
        prompt.stopping.stop.extend(["x" * limits.max_stop_bytes] * limits.max_num_stop)
        prompt.stopping.stop_token_ids.extend(range(limits.max_num_stop_token_ids))
        prompt.sampling.allowed_token_ids.extend(range(limits.max_num_allowed_token_ids))
        check_cost(prompt.SerializeToString())


@given(st.binary(max_size=200), st.integers(0, 200), st.sampled_from(sorted(COSTLY)))
def test_any_bytes_are_walked_to_their_end(start: bytes, cut: int, name: str) -> None:
    """The check of any bytes ends, with BadMessage or without an error."""
    data = start + COSTLY[name][: MIB // 16 - cut]
    with contextlib.suppress(BadMessage):
        check_cost(data)


async def test_the_public_server_refuses_costly_messages(servers: Servers) -> None:
    served = await servers.start()
    with counted(MESSAGE_FIELDS), pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(served.generation.Generate(pb.GenerateRequest.FromString(COSTLY["stop strings"]))))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("server", ["public", "admin", "local"])
async def test_every_method_refuses_costly_messages(server: str, servers: Servers, tmp_path: Path) -> None:
    local_listen = f"unix:{tmp_path}/local"
    served = await servers.start(local_listen=local_listen)
    async with grpc.aio.insecure_channel(local_listen) as local:
        channel = {"public": served.channel, "admin": served.admin_channel, "local": local}[server]
        for method in METHODS_OF_ADMIN if server == "admin" else METHODS_OF_PUBLIC:
            if method not in METHODS:  # every caller is refused before the message is read
                continue
            with counted(MESSAGE_FIELDS), pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(channel.unary_stream(method)(COSTLY["unknown texts"], timeout=30)))
            found = (refused.value.code(), "the request has more than" in str(refused.value.details()))
            assert found == (grpc.StatusCode.INVALID_ARGUMENT, True), method


async def test_long_tokens_can_be_identified(servers: Servers) -> None:
    """A gateway asks for the tenant of a client with the header that the client sent."""
    served = await servers.start()
    request = replica_pb2.IdentifyRequest(authorization="Bearer " + "a" * 16_000)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ReplicaStub(served.channel).Identify(request, timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_client_is_told_and_the_service_is_not_called() -> None:
    called: list[int] = []

    class Service(GenerationServicer):
        async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:  # type: ignore[override]  # noqa: N802
            called.append(request.ByteSize())
            await context.write(pb.GenerateResponse())

    bounded = BoundedMessages({GENERATE: pb.GenerateRequest.DESCRIPTOR})
    server = grpc.aio.server(interceptors=[ReadRequests(RequestPlaces(), 60), bounded])
    add_GenerationServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = GenerationStub(channel)
            with counted(MESSAGE_FIELDS), pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(stub.Generate(pb.GenerateRequest.FromString(COSTLY["stop strings"]))))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(bounded_messages.MAX_FIELDS) in refused.value.details()
            assert called == []
            assert await anext(aiter(stub.Generate(pb.GenerateRequest(text="a")))) == pb.GenerateResponse()
            assert called == [3]
    finally:
        await server.stop(0)
