"""Every gRPC method at the gateway, called by every kind of caller, and streams that go through it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.rpc.calls import METHODS
from gateway.rpc.server import RpcServer
from gateway.schedulers.schedulers import Schedulers
from quire import AsyncClient
from quire.errors import (
    CapacityExceededError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnauthenticatedError,
)
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from tests.scheduler.servers.test_grpc_access import CALLERS, PUBLIC, registered, status
from tests.support.gateway.fake_scheduler import Answer, Failure, FakeScheduler, delta
from tests.support.gateway.fake_scheduler import started as started_message
from tests.support.scheduler.callers import Callers
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.scheduler.servers import Servers

__all__ = ["registered"]

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


@asynccontextmanager
async def started(*addresses: str, own_key: str | None = None, **settings: Any) -> AsyncIterator[RpcServer]:
    """Runs a gateway's gRPC server before the schedulers at these addresses."""
    config = GatewayConfig(scheduler=",".join(addresses), grpc_listen="127.0.0.1:0", **settings)
    schedulers = Schedulers(config.connections(own_key), config.resume_timeout_s)
    await schedulers.start()
    server = RpcServer(schedulers, config, GatewayMetrics(schedulers))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        await schedulers.close()


@asynccontextmanager
async def faked(**settings: Any) -> AsyncIterator[tuple[FakeScheduler, RpcServer, AsyncClient]]:
    fake = FakeScheduler()
    await fake.start()
    try:
        async with started(fake.address, **settings) as server, AsyncClient(server.address, timeout_s=20) as client:
            yield fake, server, client
    finally:
        await fake.stop()


@pytest.mark.parametrize("caller", CALLERS)
async def test_each_method_answers_each_caller_as_its_scheduler_does(
    caller: str, servers: Servers, tmp_path: Path, registered: dict[int, set[str]]
) -> None:
    """The gateway calls at the local address, where it may do everything: its clients must not."""
    callers, local = Callers(tmp_path), f"unix:{tmp_path}/local.sock"
    await servers.start(access=callers.access(), local_listen=local)
    registered.clear()
    async with started(local) as server, grpc.aio.insecure_channel(server.address) as channel:
        (offered,) = registered.values()
        assert offered >= METHODS
        # A method that a library or a later version adds to the server is refused until it has a row.
        expected = {each: PUBLIC[each][CALLERS.index(caller)] if each in METHODS else UNIMPLEMENTED for each in offered}
        found = {each: await status(channel, each, callers.metadata(caller)) for each in sorted(offered)}
    assert found == expected


@pytest.mark.parametrize("method", [*sorted(PUBLIC.keys() - METHODS), "/quire.v1.Admin/Drain", "/x/y"])
async def test_no_other_method_is_reached_even_by_an_admin(method: str, servers: Servers, tmp_path: Path) -> None:
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    async with started(served.server.address) as server, grpc.aio.insecure_channel(server.address) as channel:
        assert await status(channel, method, callers.metadata("admin")) is UNIMPLEMENTED
    assert served.engine.is_ready


async def test_a_method_without_a_row_is_refused(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, callers = "/quire.v1.Generation/GetServerInfo", Callers(tmp_path)
    served = await servers.start(access=callers.access())
    monkeypatch.setattr("gateway.rpc.calls.METHODS", METHODS - {info})
    async with started(served.server.address) as server, grpc.aio.insecure_channel(server.address) as channel:
        assert await status(channel, info, callers.metadata("admin")) is UNIMPLEMENTED
        other = "/quire.v1.Tokenization/GetTokenizerInfo"
        assert await status(channel, other, callers.metadata("admin")) is grpc.StatusCode.OK


async def test_a_stream_continues_after_its_scheduler_broke_off() -> None:
    async with faked() as (fake, _, client):
        fake.words_each, fake.step_s = 60, 0.005
        completing = asyncio.create_task(client.complete("hi"))
        await until(lambda: fake.opened)
        await asyncio.sleep(0.03)
        await fake.stop()
        await fake.start()
        completion = await completing
    assert completion.text == "".join(f"w{i} " for i in range(60))
    assert client.num_resumptions == 0, "the client has noticed it"
    assert len(fake.opened) == 2


async def test_a_request_that_ends_its_schedulers_is_given_up_for_its_client_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for pause in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"quire.tries.{pause}", 0.0)

    async def end(request: pb.GenerateRequest) -> Answer:
        yield started_message()
        raise Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with faked() as (fake, _, client):
        fake.answer = end
        with pytest.raises(InternalError, match="21 breaks in a row"):
            await client.complete("hi")
    assert len(fake.opened) == 21
    assert client.num_resumptions == 0


async def test_a_client_can_continue_a_stream_of_another_gateway() -> None:
    """Its own gateway has died: it sends what it has received to this one, whose scheduler breaks off once more."""
    async with faked() as (fake, server, _):
        fake.words_each, fake.step_s = 60, 0.005
        request = pb.GenerateRequest(text="hi", resumable=True)
        request.resume.continuation.CopyFrom(pb.Continuation(seed=5, prompt=pb.TokenIds(ids=[1, 2, 3])))
        request.resume.sequences.add(index=0, token_ids=range(10, 15))
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = GenerationStub(channel).Generate(request)
            texts = []
            async for message in call:
                texts.append(message.delta.text)
                if len(texts) == 8:
                    await fake.stop()
                    await fake.start()
    assert "".join(texts) == "".join(f"w{i} " for i in range(5, 60))
    first, second = fake.requests[0], fake.requests[-1]
    assert len(first.resume.sequences) == len(second.resume.sequences) == 1
    assert len(second.resume.sequences[0].token_ids) > len(first.resume.sequences[0].token_ids) == 5


async def test_a_client_is_not_told_what_it_did_not_ask_for() -> None:
    async with faked() as (_, server, _), grpc.aio.insecure_channel(server.address) as channel:
        stub = GenerationStub(channel)
        plain = [each async for each in stub.Generate(pb.GenerateRequest(text="hi"))]
        resumable = [each async for each in stub.Generate(pb.GenerateRequest(text="hi", resumable=True))]
    assert not plain[0].started.HasField("continuation")
    assert resumable[0].started.continuation.seed == 5


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(grpc.StatusCode.INVALID_ARGUMENT, "bad", violations={"text": "is bad"}), InvalidRequestError),
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=2.5), QueueFullError),
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "much", retry_after_s=2.5, is_of_tenant=True), QueueFullError),
        (Failure(grpc.StatusCode.OUT_OF_RANGE, "long"), CapacityExceededError),
        (Failure(grpc.StatusCode.UNAUTHENTICATED, "not known"), UnauthenticatedError),
    ],
)
async def test_errors_pass_with_their_details(failure: Failure, expected: type[Exception]) -> None:
    async def refuse(request: pb.GenerateRequest) -> Answer:
        raise failure
        yield

    async with faked() as (fake, _, client):
        fake.answer = refuse
        with pytest.raises(expected) as error:
            await client.complete("hi")
    if isinstance(error.value, InvalidRequestError):
        assert error.value.violations == {"text": "is bad"}
    if isinstance(error.value, QueueFullError):
        assert error.value.retry_after_s == 2.5
        assert error.value.is_of_tenant == ("much" in str(error.value))


async def test_a_deadline_goes_along_and_a_client_that_goes_away_cancels() -> None:
    async with faked() as (fake, server, client):
        await client.complete("hi")  # connects, which may take longer than the deadline
        fake.words_each, fake.step_s = 10_000, 0.01
        with pytest.raises(DeadlineExceededError):
            await client.complete("hi", timeout_s=2)
        assert 0 < fake.opened[1].timeout_ms <= 2100, "gRPC rounds it up"
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = GenerationStub(channel).Generate(pb.GenerateRequest(text="hi"))
            await call.read()
            call.cancel()
            await until(lambda: len(fake.cancelled) == 2)


async def test_metrics_count_calls_as_they_count_requests_of_http() -> None:
    async def broken(request: pb.GenerateRequest) -> Answer:
        yield started_message()
        yield delta(0, "a", 1)
        raise Failure(grpc.StatusCode.INTERNAL, "bug")

    async with faked() as (fake, server, client):

        def lines() -> list[str]:
            return server._generation._metrics.page().decode().splitlines()

        fake.words_each, fake.step_s = 100, 0.01
        completing = asyncio.create_task(client.complete("hi"))
        await until(lambda: "quire_gateway_open_requests 1.0" in lines())
        await completing
        fake.answer = broken
        with pytest.raises(InternalError):
            await client.complete("hi")
        fake.answer = fake.words
        leaving = asyncio.create_task(client.complete("hi"))
        await until(lambda: len(fake.opened) == 3)
        leaving.cancel()
        await until(lambda: "quire_gateway_disconnects_total 1.0" in lines())
        await client.server_info()
        found = lines()
    for name, number in (
        ('requests_total{path="/quire.v1.Generation/Generate",status="OK"}', 1),
        ('requests_total{path="/quire.v1.Generation/Generate",status="INTERNAL"}', 1),
        ('requests_total{path="/quire.v1.Generation/Generate",status="UNAVAILABLE"}', 0),
        ('requests_total{path="/quire.v1.Generation/GetServerInfo",status="OK"}', 1),
        ("open_requests", 0),
        ("time_to_first_token_seconds_count", 2),
    ):
        assert f"quire_gateway_{name} {number}.0" in found


async def test_too_many_requests_and_requests_during_a_drain_are_refused() -> None:
    async with faked(max_requests=1) as (fake, server, client):
        fake.words_each, fake.step_s = 100, 0.01
        first = asyncio.create_task(client.complete("hi"))
        await until(lambda: fake.opened)
        with pytest.raises(QueueFullError, match="1 open requests"):
            await client.complete("hi")
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0.05)
        assert len((await first).text.split()) == 100
        assert await stopping


async def test_health_follows_the_schedulers() -> None:
    async with faked() as (fake, server, _), grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def state() -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="quire.v1.Generation"))
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        async def serves() -> bool:
            return await state() == "SERVING"

        async def does_not_serve() -> bool:
            return await state() == "NOT_SERVING"

        await until(serves)
        fake.state = pb.SERVER_STATE_DRAINING
        await until(does_not_serve)
        fake.state = pb.SERVER_STATE_SERVING
        await until(serves)


async def test_health_misses_no_change_while_the_server_starts() -> None:
    config = GatewayConfig(scheduler="127.0.0.1:1", grpc_listen="127.0.0.1:0")
    schedulers = Schedulers(config.connections(None), config.resume_timeout_s)
    server = RpcServer(schedulers, config, GatewayMetrics(schedulers))
    asyncio.get_running_loop().call_soon(schedulers.all[0]._set_ready, True, "SERVING")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop()
        await schedulers.close()


async def test_a_costly_message_is_refused_before_it_is_parsed() -> None:
    request = pb.GenerateRequest()
    for _ in range(20_000):
        request.chat.messages.add()
    async with faked() as (fake, server, _), grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await GenerationStub(channel).Generate(request).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not fake.opened
