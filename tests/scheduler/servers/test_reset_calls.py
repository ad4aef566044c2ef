"""Calls that are cancelled at once keep their streams, so that a client that resets streams runs out of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.attacks import http2
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import add_key
from scheduler.identity.verifier import Verifier
from scheduler.servers import reset_calls
from scheduler.servers.access import Access
from scheduler.servers.grpc_server import GENERATE
from scheduler.servers.reset_calls import BURST, MAX_LINGER_S, RATE_PER_S, ResetCalls
from scheduler.telemetry.limits import NUM_LIMITED, RESET_CALLS
from tests.support.scheduler.many_calls import many_call, opened
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.scheduler.servers import Served, Servers

MAX_STREAMS = 2 * 256  # open ones, and ones that were reset
HEALTH = "/grpc.health.v1.Health/Check"


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_ends_at_once_and_the_rest_at_a_rate() -> None:
    clock = Clock()
    calls = ResetCalls(clock)
    assert [calls.linger_s("a") for _ in range(BURST)] == pytest.approx([0.0] * BURST)
    assert [calls.linger_s("a") for _ in range(3)] == pytest.approx([i / RATE_PER_S for i in (1, 2, 3)])
    assert calls.linger_s("b") == 0.0, "another tenant has a budget of its own"
    clock.now_s += (BURST + 3) / RATE_PER_S
    assert calls.linger_s("a") == 0.0, "all have been paid for"


def test_no_call_lingers_for_longer_than_the_bound() -> None:
    calls = ResetCalls(Clock())
    assert max(calls.linger_s("a") for _ in range(int(RATE_PER_S * MAX_LINGER_S) + 2 * BURST)) == MAX_LINGER_S


def test_tenants_that_have_paid_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_calls, "_MAX_TENANTS", 3)
    clock = Clock()
    calls = ResetCalls(clock)
    for i in range(20):
        calls.linger_s(str(i))
        clock.now_s += 2 / RATE_PER_S
    assert len(calls._free_s) <= 5


@pytest.fixture
def num_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of the calls that gRPC gave to the server. Calls that linger are not released."""
    monkeypatch.setattr(reset_calls, "RATE_PER_S", 1e-3)
    monkeypatch.setattr(reset_calls, "BURST", 0)
    found: list[str] = []
    intercept = ResetCalls.intercept_service

    async def record(self: Any, continuation: Any, details: Any) -> Any:
        found.append(details.method)
        return await intercept(self, continuation, details)

    monkeypatch.setattr(ResetCalls, "intercept_service", record)
    return found


@asynccontextmanager
async def connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(http2.PREFACE + http2.settings() + http2.settings_acknowledged())
    draining = asyncio.create_task(reader.read(-1))
    try:
        yield reader, writer
    finally:
        writer.close()
        draining.cancel()


async def is_served(served: Served) -> bool:
    answer = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("path", [GENERATE, "/quire.v1.Generation/GetServerInfo", HEALTH])
async def test_a_connection_that_resets_its_streams_runs_out_of_them(
    path: str, servers: Servers, num_calls: list[str]
) -> None:
    served = await servers.start()
    fields = http2.grpc_call(served.server.address, path, None)
    num_before, num_sent = NUM_LIMITED[RESET_CALLS], 0
    async with connection(served.server.address) as (_, writer):
        for first_id in range(1, 100 * 64, 64):
            for i in range(first_id, first_id + 64, 2):
                writer.write(http2.headers(i, fields) + http2.reset(i))
                num_sent += 1
            await writer.drain()
            assert await is_served(served), "others are served, and the server has read on meanwhile"
    num_checks = 100 if path == HEALTH else 0
    assert num_sent == 3200
    assert 0 < num_calls.count(path) - num_checks <= MAX_STREAMS + 1
    await until(lambda: NUM_LIMITED[RESET_CALLS] - num_before == num_calls.count(path) - num_checks)


async def test_a_server_that_stops_does_not_wait_for_calls_that_linger(servers: Servers, num_calls: list[str]) -> None:
    served = await servers.start()
    fields = http2.grpc_call(served.server.address, GENERATE, None)
    async with connection(served.server.address) as (_, writer):
        for i in range(1, 200, 2):
            writer.write(http2.headers(i, fields) + http2.reset(i))
        await writer.drain()
        async with asyncio.timeout(30):
            while num_calls.count(GENERATE) < 100:
                assert await is_served(served)
    async with asyncio.timeout(30):
        await served.server.stop(0)


async def test_a_call_without_a_request_is_refused(servers: Servers) -> None:
    served = await servers.start()
    call = served.channel.stream_stream(GENERATE)(metadata=(), timeout=30)
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no request" in await call.details()


async def test_a_client_that_gives_up_waiting_has_not_reset_its_call(servers: Servers, num_calls: list[str]) -> None:
    """Its request came, and the deadline of the call has passed: nothing lingers."""
    served = await servers.start()
    before = NUM_LIMITED[RESET_CALLS]

    async def give_up() -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in GenerationStub(served.channel).Generate(pb.GenerateRequest(text="a" * 9), timeout=2.0):
                pass

    await asyncio.gather(*[give_up() for _ in range(20)])
    assert num_calls.count(GENERATE) == 20
    assert NUM_LIMITED[RESET_CALLS] == before


async def test_a_call_of_many_requests_that_ends_after_a_while_has_not_been_reset(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reset_calls, "AT_ONCE_S", 0.2)
    monkeypatch.setattr(reset_calls, "BURST", 0)
    served = await servers.start()
    before = NUM_LIMITED[RESET_CALLS]
    async with many_call(served.generation) as call:
        (await opened(served, call, 1)).emit([60])
        await until(lambda: 1 in call.messages)
        await asyncio.sleep(0.3)
    await served.idle()
    await asyncio.sleep(0.1)
    assert NUM_LIMITED[RESET_CALLS] == before
    async with many_call(served.generation) as call:
        await opened(served, call, 1)
    await until(lambda: NUM_LIMITED[RESET_CALLS] > before, what="a call that is cancelled at once lingers")


async def test_the_refused_calls_of_strangers_linger_after_their_status(
    servers: Servers, num_calls: list[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "keys.json")
    add_key(path, Identity("a", "a", frozenset({Role.GENERATE})))
    served = await servers.start(access=Access(Verifier(path)))
    before = NUM_LIMITED[RESET_CALLS]
    for _ in range(5):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await GenerationStub(served.channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await until(lambda: NUM_LIMITED[RESET_CALLS] == before + 5, what="each call is counted, soon after its status")
