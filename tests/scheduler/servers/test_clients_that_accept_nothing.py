"""Clients whose HTTP/2 window is empty accept no answer. They cost a bounded memory, and other clients do not wait."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.attacks import http2
from quire.health_service import HealthService
from quire.v1 import replica_pb2, tokenization_pb2
from quire.v1.replica_pb2_grpc import ReplicaStub
from scheduler.core import QueueFull
from scheduler.engine.engine import ServerState
from scheduler.servers import replica_server, request_places
from scheduler.servers.request_places import RequestPlaces
from scheduler.telemetry.limits import NUM_LIMITED, STALLED_READERS
from tests.scheduler.servers.test_reset_calls import is_served
from tests.support.scheduler.limits import counted
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.scheduler.servers import Servers

WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
TOKENIZE = "/quire.v1.Tokenization/Tokenize"
STATUS = health_pb2.HealthCheckResponse


@asynccontextmanager
async def calls(address: str, path: str, request: bytes, num_calls: int = 1) -> AsyncIterator[asyncio.StreamReader]:
    """Makes calls on a connection that accepts no byte of an answer."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(http2.PREFACE + http2.settings(0) + http2.settings_acknowledged())
        for i in range(1, 2 * num_calls, 2):
            writer.write(http2.headers(i, http2.grpc_call(address, path, None)) + http2.message(i, request))
        await writer.drain()
        yield reader
    finally:
        writer.close()


def num_open(places: list[RequestPlaces]) -> int:
    """Returns how many answers wait for their clients, if each of them is small."""
    return sum(sum(each._answer_bytes.values()) for each in places) // request_places._CALL_BYTES


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[RequestPlaces]:
    """The places of all servers that a test starts."""
    made: list[RequestPlaces] = []
    begin = RequestPlaces.__init__

    def init(self: RequestPlaces, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(RequestPlaces, "__init__", init)
    return made


@pytest.mark.parametrize("stops", [False, True])
async def test_a_watch_that_accepts_nothing_keeps_no_status_and_no_server(servers: Servers, stops: bool) -> None:
    served = await servers.start()
    health = health_pb2_grpc.HealthStub(served.channel)
    async with calls(served.server.address, WATCH, b"") as reader:
        await reader.read(1)
        await asyncio.sleep(0.2)  # its answer is on the way
        watch = health.Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(10):
            assert (await watch.read()).status == STATUS.SERVING
            served.engine.become(ServerState.WAITING_FOR_EXECUTOR)
            assert (await watch.read()).status == STATUS.NOT_SERVING
        assert not await is_served(served)
        if stops:
            async with asyncio.timeout(10):
                await served.server.stop(0)


class WatchedHealth(HealthService):
    """Says when a call of Watch has ended."""

    def __init__(self) -> None:
        super().__init__(write_timeout_s=0.05)
        self.has_ended = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        try:
            await super().Watch(request, context)
        finally:
            self.has_ended.set()


async def test_a_watch_that_accepts_nothing_ends() -> None:
    service, server = WatchedHealth(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with calls(f"127.0.0.1:{port}", WATCH, b""), asyncio.timeout(10):
            await service.has_ended.wait()
    finally:
        await server.stop(0)


async def test_a_router_that_accepts_nothing_loses_its_place(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_server, "MAX_WATCHES", 4)
    served = await servers.start(stalled_reader_timeout_s=0.5)
    request = replica_pb2.WatchRequest(router_id="stalled").SerializeToString()

    async def is_watching() -> bool:
        watch = ReplicaStub(served.channel).Watch(replica_pb2.WatchRequest(router_id="other"))
        try:
            return isinstance(await watch.read(), replica_pb2.WatchResponse)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
        finally:
            watch.cancel()

    async with calls(served.server.address, "/quire.v1.Replica/Watch", request, 4):
        for wanted in (False, True):  # they have all places, and lose them
            for _ in range(300):
                if await is_watching() is wanted:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError(wanted)


async def test_answers_that_are_not_accepted_are_counted_and_end(servers: Servers, places: list[RequestPlaces]) -> None:
    served = await servers.start(stalled_reader_timeout_s=0.5)
    before = NUM_LIMITED[STALLED_READERS]
    request = tokenization_pb2.TokenizeRequest(text="Once upon a time").SerializeToString()
    async with calls(served.server.address, TOKENIZE, request, 5), calls(served.server.address, CHECK, b"", 4):
        await until(lambda: num_open(places) == 9, what="all answers wait")
        assert await is_served(served)
        await until(lambda: num_open(places) == 0, what="they have ended")
    assert NUM_LIMITED[STALLED_READERS] == before + 9


async def test_answers_beyond_the_bound_are_refused(
    servers: Servers, places: list[RequestPlaces], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_places, "MAX_ANSWER_BYTES", 3 * request_places._CALL_BYTES)
    served = await servers.start()
    health = health_pb2_grpc.HealthStub(served.channel)
    async with calls(served.server.address, CHECK, b"", 3):
        await until(lambda: num_open(places) == 3, what="all answers wait")
        with counted(STALLED_READERS), pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: num_open(places) == 0, what="the calls have ended with their connection")
    assert await is_served(served)


def test_an_answer_counts_until_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "MAX_ANSWER_BYTES", 1 << 20)
    places = RequestPlaces()
    with places.answer("a", 1 << 20):
        with counted(STALLED_READERS), pytest.raises(QueueFull), places.answer("a", 0):
            pass
        with places.answer("b", 1 << 20):
            pass
    with places.answer("a", 1 << 20):
        pass


async def test_half_open_calls_of_unknown_callers_take_no_place_of_others(
    servers: Servers, places: list[RequestPlaces]
) -> None:
    served = await servers.start()
    fields = http2.grpc_call(served.server.address, CHECK, None)
    host, port = served.server.address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(http2.PREFACE + http2.settings() + http2.settings_acknowledged())
        for i in range(1, 65, 2):
            writer.write(http2.headers(i, fields))
        await writer.drain()
        await until(lambda: sum(len(each._reads) for each in places) == 4, what="those of one address have come")
        known = places[0]
        assert not known._reads
        async with asyncio.timeout(10):
            assert await is_served(served), "the address's own calls give way"
    finally:
        writer.close()
