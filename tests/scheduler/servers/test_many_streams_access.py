"""The callers of GenerateMany, and the clients on whose behalf they make requests."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.tls import channel_credentials
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.identity.identity import Identity, Role, Unauthenticated
from scheduler.identity.key_file import add_certificate, revoke
from scheduler.identity.verifier import Verifier
from scheduler.servers.access import MAX_AUTHORIZATION_BYTES, Access
from tests.support.certificates import Authority
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.generation_calls import text_request
from tests.support.scheduler.many_calls import ManyCall, many_call
from tests.support.scheduler.servers import Served, Servers
from tests.support.waiting import until

OK = grpc.StatusCode.OK.value[0]
DENIED = grpc.StatusCode.PERMISSION_DENIED.value[0]
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED.value[0]

EXPECTED = {
    "absent": (OK, "tenant-of-generate"),
    "none": (UNKNOWN, None),
    "wrong": (UNKNOWN, None),
    "generate": (OK, "tenant-of-generate"),
    "observe": (DENIED, None),
    "admin": (OK, "tenant-of-admin"),
}


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(tmp_path)


def opening_of(callers: Callers, client: str) -> dict[str, Any]:
    return {} if client == "absent" else {"authorization": callers.header(client).get("authorization", "")}


async def expect_refusal(call: ManyCall, served: Served) -> None:
    """Opens streams, from number 2 on, until one is refused: the key file is read again once in a while."""
    for number in range(2, 300):
        await call.open(number, text_request())
        await until(lambda number=number: number in call.ended or len(served.engine.submitted) >= number)
        if number in call.ended:
            break
        await asyncio.sleep(0.05)
    assert call.ended[number].code == UNKNOWN
    assert 1 not in call.ended, "what is open goes on"


@pytest.mark.parametrize("client", EXPECTED)
async def test_a_request_is_that_of_the_client_that_it_names(client: str, servers: Servers, callers: Callers) -> None:
    served = await servers.start(access=callers.access())
    code, tenant = EXPECTED[client]
    async with many_call(served.generation, callers.metadata("generate")) as call:
        await call.open(1, text_request(), **opening_of(callers, client))
        if tenant is not None:
            submitted = await served.engine.next_request()
            assert submitted.request.tenant == tenant
            assert dict(served.intake.open_streams._num_open) == {tenant: 1}
            submitted.start().finish()
        ended = await call.end_of(1)
        assert ended.code == code
        assert ended.status_details == b""
        await served.idle()
    refused = {UNKNOWN: ["unauthenticated"], DENIED: ["permission_denied"], OK: []}
    assert callers.counted == refused[code]
    assert len(served.engine.submitted) == (tenant is not None)


@pytest.mark.parametrize("more", [(), (("authorization", ""),)], ids=["one-header", "two-headers"])
async def test_a_revoked_key_opens_no_further_stream_of_its_call(
    more: tuple[tuple[str, str], ...], servers: Servers, callers: Callers
) -> None:
    served = await servers.start(access=callers.access())
    async with many_call(served.generation, (*callers.metadata("generate"), *more)) as call:
        await call.open(1, text_request())
        (await served.engine.next_request()).start()
        revoke(callers.path, "the-generate")
        await expect_refusal(call, served)


async def test_a_revoked_certificate_opens_no_further_stream_of_its_call(servers: Servers, tmp_path: Path) -> None:
    authority, path = Authority.create(tmp_path / "authority"), str(tmp_path / "keys.json")
    add_certificate(path, Identity("billing", "billing", frozenset({Role.GENERATE})), "billing.example")
    access = Access(Verifier(path), tls=authority.issue_for_loopback())
    served = await servers.start(access=access, admin_listen="127.0.0.1:0")
    credentials = channel_credentials(authority.issue("client", "DNS:billing.example"))
    async with grpc.aio.secure_channel(served.server.address, credentials) as channel:
        async with many_call(GenerationStub(channel)) as call:
            await call.open(1, text_request())
            (await served.engine.next_request()).start()
            revoke(path, "billing")
            await expect_refusal(call, served)


async def test_clients_of_one_call_are_apart(servers: Servers, callers: Callers) -> None:
    """Each stream's task has a caller of its own, whatever the order of the requests."""
    served = await servers.start(access=callers.access())
    async with many_call(served.generation, callers.metadata("admin")) as call:
        order = ["generate", "absent", "wrong", "admin", "observe", "generate", "none", "absent"]
        for stream_id, client in enumerate(order):
            await call.open(stream_id, text_request(priority=stream_id), **opening_of(callers, client))
        tenants = {}
        for _ in range(5):
            submitted = await served.engine.next_request()
            tenants[submitted.request.priority] = submitted.request.tenant
            submitted.start().finish()
        assert tenants == {
            0: "tenant-of-generate",
            1: "tenant-of-admin",
            3: "tenant-of-admin",
            5: "tenant-of-generate",
            7: "tenant-of-admin",
        }
        for stream_id in range(len(order)):
            await call.end_of(stream_id)


@pytest.mark.parametrize("caller", ["generate", "admin"])
@pytest.mark.parametrize("header", ["Bearer", "bearer qk_", "Basic %%%", "Digest x", "x" * 10_000, "Bearer " + "é" * 9])
async def test_strange_credentials_end_the_stream(
    header: str, caller: str, servers: Servers, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    served = await servers.start(access=callers.access())
    with caplog.at_level(logging.DEBUG):
        async with many_call(served.generation, callers.metadata(caller)) as call:
            await call.open(1, text_request(), authorization=header, client="192.0.2.9")
            assert (await call.end_of(1)).code == UNKNOWN
    (line,) = [vars(record) for record in caplog.records if record.getMessage() == "call refused"]
    assert (line["call"], line["client"]) == ("/quire.v1.Generation/GenerateMany", "192.0.2.9")


async def test_without_identity_any_credentials_are_anonymous(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        for stream_id, opening in enumerate(({}, {"authorization": ""}, {"authorization": "Bearer x"})):
            await call.open(stream_id, text_request(), **opening)
            submitted = await served.engine.next_request()
            assert submitted.request.tenant == "default"
            submitted.start().finish()
            assert await call.end_of(stream_id) == pb.Ended()


async def test_long_credentials_are_not_verified(
    servers: Servers, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await servers.start(access=callers.access())
    seen: list[int] = []

    async def identify(verifier: Verifier, authorization: str | None) -> Identity | None:
        seen.append(len(authorization or ""))
        raise Unauthenticated("no")

    async with many_call(served.generation, callers.metadata("generate")) as call:
        await call.open(1, text_request(), authorization="")
        await call.end_of(1)
        monkeypatch.setattr(Verifier, "identify", identify)
        for stream_id, size in ((2, MAX_AUTHORIZATION_BYTES), (3, MAX_AUTHORIZATION_BYTES + 1)):
            await call.open(stream_id, text_request(), authorization="x" * size)
            assert (await call.end_of(stream_id)).code == UNKNOWN
    assert seen == [MAX_AUTHORIZATION_BYTES]


async def test_slow_verification_holds_up_no_other_stream_and_ends_at_the_deadline(
    servers: Servers, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await servers.start(access=callers.access())
    identify = Verifier.identify

    async def hang(verifier: Verifier, authorization: str | None) -> Identity | None:
        if authorization == "Bearer slow":
            await asyncio.Event().wait()
        return await identify(verifier, authorization)

    monkeypatch.setattr(Verifier, "identify", hang)
    async with many_call(served.generation, callers.metadata("generate")) as call:
        await call.open(1, text_request(), authorization="Bearer slow")
        await call.open(2, text_request(), authorization="Bearer slow", timeout_ms=50)
        await call.open(3, text_request(), **opening_of(callers, "admin"))
        (await served.engine.next_request()).start().finish()
        assert await call.end_of(3) == pb.Ended()
        assert (await call.end_of(2)).code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        await call.cancel(1)
        await until(lambda: not served.intake.open_streams)
    assert len(served.engine.submitted) == 1
