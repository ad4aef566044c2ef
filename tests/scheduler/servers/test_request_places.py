"""Few requests are received at once, and tenants take turns."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.attacks import http2
from quire.v1 import generation_pb2 as pb
from scheduler.core import QueueFull
from scheduler.requests.status import DeadlineExceeded
from scheduler.servers import request_places
from scheduler.servers.grpc_server import GENERATE
from scheduler.servers.request_places import LARGE_BYTES, RequestPlaces
from scheduler.telemetry.limits import REQUEST_READS
from tests.scheduler.servers.test_reset_calls import connection, is_served
from tests.support.scheduler.limits import counted

if TYPE_CHECKING:
    from tests.support.scheduler.servers import Servers


class Message:
    """A message that has not arrived yet."""

    def __init__(self) -> None:
        self.arrival: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.is_awaited = False
        self.is_cancelled = False

    async def receive(self) -> bytes:
        self.is_awaited = True
        try:
            return await self.arrival
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


class World:
    """Calls whose messages arrive when a test says so."""

    def __init__(self) -> None:
        self.places = RequestPlaces()
        self.messages: list[Message] = []

    def call(self, tenant: str, connection: str = "c") -> tuple[Message, asyncio.Task[Any]]:
        message = Message()
        self.messages.append(message)
        return message, asyncio.create_task(self.places.read((tenant, connection), message.receive, bytes.decode))

    @property
    def awaited(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message.is_awaited]


async def turn_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "MAX_READS", 3)
    monkeypatch.setattr(request_places, "MAX_READS_OF_A_TENANT", 3)
    monkeypatch.setattr(request_places, "MAX_WAITING", 4)


async def test_calls_beyond_the_places_wait_and_nothing_is_lost() -> None:
    world = World()
    calls = [world.call("a") for _ in range(6)]
    await turn_of_the_loop()
    assert world.awaited == [0, 1, 2]
    for i, (message, call) in enumerate(calls):
        message.arrival.set_result(b"%d" % i)
        assert await call == str(i)
    assert world.places._reads == {}
    assert not world.places._queues
    assert not world.places._num_reads
    assert not world.places._num_waiting


async def test_the_next_place_is_for_the_tenant_and_the_connection_with_the_fewest() -> None:
    world = World()
    held = [world.call("a", "1")[0] for _ in range(2)] + [world.call("b", "2")[0]]
    for key in (("a", "1"), ("a", "3"), ("b", "2"), ("c", "4")):
        world.call(*key)
        await turn_of_the_loop()
    # b and c receive nothing then, and b came first; then c; then the connection of a that receives nothing.
    for ending, next_one in ((held[2], 5), (held[0], 6), (world.messages[5], 4)):
        num_before = len(world.awaited)
        ending.arrival.set_result(b"")
        await turn_of_the_loop()
        assert next_one in world.awaited
        assert len(world.awaited) == num_before + 1


async def test_calls_of_a_tenant_beyond_those_that_may_wait_are_refused() -> None:
    world = World()
    calls = [world.call("a") for _ in range(7)]
    await turn_of_the_loop()
    with counted(REQUEST_READS), pytest.raises(QueueFull):
        await world.call("a")[1]
    other, call = world.call("b")
    calls[0][0].arrival.set_result(b"")
    other.arrival.set_result(b"b")
    assert await call == "b", "the calls of another tenant wait, and are next"


async def test_a_waiting_call_that_is_cancelled_leaves_nothing() -> None:
    world = World()
    held = [world.call("a")[0] for _ in range(3)]
    await turn_of_the_loop()
    _, waiting = world.call("a")
    await turn_of_the_loop()
    waiting.cancel()
    await turn_of_the_loop()
    assert not world.places._num_waiting
    for message in held:
        message.arrival.set_result(b"")
    await turn_of_the_loop()
    assert (world.places._reads, world.places._queues) == ({}, {})


async def test_a_call_that_is_cancelled_when_it_gets_its_place_gives_it_back() -> None:
    world = World()
    held = [world.call("a") for _ in range(3)]
    await turn_of_the_loop()
    message, waiting = world.call("a")
    await turn_of_the_loop()
    world.places._leave(next(iter(world.places._reads)))  # the place is given; its call has not run since
    waiting.cancel()
    await turn_of_the_loop()
    assert len(world.places._reads) == 2
    assert not message.is_awaited
    assert held


async def test_a_call_that_is_cancelled_does_not_cancel_its_read() -> None:
    """Otherwise grpc.aio would not free its message. The place is kept until then."""
    world = World()
    message, call = world.call("a")
    await turn_of_the_loop()
    call.cancel()
    await turn_of_the_loop()
    assert call.cancelled()
    assert (message.is_cancelled, len(world.places._reads)) == (False, 1)
    message.arrival.set_result(b"")
    await turn_of_the_loop()
    assert world.places._reads == {}


async def test_a_message_that_does_not_arrive_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "TIMEOUT_S", 0.05)
    message, call = World().call("a")
    with counted(REQUEST_READS), pytest.raises(DeadlineExceeded):
        await call
    assert not message.is_cancelled


async def test_late_messages_of_the_tenant_with_the_most_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "GIVE_WAY_S", 0.0)
    world = World()
    first, other, last = world.call("b")[1], world.call("a")[1], world.call("a")[1]
    await turn_of_the_loop()
    waiting, call = world.call("c")
    with pytest.raises(DeadlineExceeded):
        await other
    assert not first.done()
    assert not last.done()
    world.messages[1].arrival.set_result(b"")  # its call has ended
    waiting.arrival.set_result(b"c")
    assert await call == "c"


async def test_no_message_gives_way_to_a_tenant_that_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "GIVE_WAY_S", 0.0)
    world = World()
    late = world.call("b")[1]
    await turn_of_the_loop()
    places = world.places
    new_ones = [places._enter(("a", "c")) for _ in range(2)]
    for read in new_ones:
        read.began_s += 3600.0  # they are not late
    waiting = world.call("a")[1]
    await turn_of_the_loop()
    for _ in range(3):
        places._sweep()
    assert not late.done()
    assert not waiting.done()
    places._leave(new_ones[0])
    await turn_of_the_loop()
    assert world.awaited == [0, 1]


async def test_a_tenant_leaves_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "MAX_READS_OF_A_TENANT", 2)
    world = World()
    for _ in range(3):
        world.call("a")
    await turn_of_the_loop()
    world.call("b")
    await turn_of_the_loop()
    assert world.awaited == [0, 1, 3]
    world.messages[0].arrival.set_result(b"")
    await turn_of_the_loop()
    assert world.awaited == [0, 1, 2, 3]


async def test_large_messages_are_parsed_one_after_the_other_and_tenants_take_turns() -> None:
    places, large = RequestPlaces(), b"a" * (LARGE_BYTES + 1)
    order: list[str] = []

    def parse(data: bytes) -> int:
        order.append(data[-1:].decode())
        time.sleep(0.01)
        return len(data)

    calls = [asyncio.create_task(places.parsed("a", large, parse)) for _ in range(3)]
    await turn_of_the_loop()
    assert order == ["a"]
    calls.append(asyncio.create_task(places.parsed("b", large + b"b", parse)))
    began_s = time.monotonic()
    assert await places.parsed("c", b"c", parse) == 1, "a small message does not wait"
    assert await asyncio.gather(*calls) == [LARGE_BYTES + 1] * 3 + [LARGE_BYTES + 2]
    assert order == ["a", "c", "a", "b", "a"]
    assert time.monotonic() - began_s > 0.1, "a pause follows each large message"


async def test_a_message_that_cannot_be_parsed_gives_its_turn_back() -> None:
    places, large = RequestPlaces(), b"a" * (LARGE_BYTES + 1)

    def fail(_: bytes) -> None:
        raise KeyError

    for _ in range(3):
        with pytest.raises(KeyError):
            await places.parsed("a", large, fail)
    assert await places.parsed("a", large, len) == len(large)


async def test_a_message_that_has_arrived_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "GIVE_WAY_S", 0.0)
    monkeypatch.setattr(request_places, "TIMEOUT_S", 0.05)
    world = World()
    turn = await world.places._parsing.take("other", 1)
    message, call = world.call("a")
    message.arrival.set_result(b"a" * (LARGE_BYTES + 1))
    waiting = [world.call("a")[1] for _ in range(3)]
    await asyncio.sleep(0.1)
    assert not call.done()
    turn.end()
    assert len(await call) == LARGE_BYTES + 1
    for each in waiting[:2]:
        with pytest.raises(DeadlineExceeded):
            await each


def test_a_tenant_has_a_bounded_number_of_streams_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_places, "MAX_STREAMS", 1)
    places = RequestPlaces()
    with places.stream("a"):
        with counted(REQUEST_READS), pytest.raises(QueueFull), places.stream("a"):
            pass
        with places.stream("b"):
            pass
    with places.stream("a"):
        pass


async def test_half_open_calls_wait_at_the_server_and_others_are_served(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_places, "GIVE_WAY_S", 0.0)
    served = await servers.start()
    fields = http2.grpc_call(served.server.address, GENERATE, None)
    async with connection(served.server.address) as (_, writer):
        for i in range(1, 13, 2):
            writer.write(http2.headers(i, fields))
        await writer.drain()
        for _ in range(20):
            assert await is_served(served)


async def test_the_public_server_bounds_the_streams_of_requests(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_places, "MAX_STREAMS", 2)
    served = await servers.start()
    held = [served.generation.GenerateMany() for _ in range(2)]
    for call in held:
        await call.write(pb.GenerateManyRequest(stream_id=1, open=pb.OpenStream()))
        await call.read()
    third = served.generation.GenerateMany()
    assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    held[0].cancel()
    watches = [health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    for watch in watches[:2]:
        await watch.read()
    assert await watches[2].code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "and those of strangers that watch its health"
    info = await served.generation.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
    assert info.block_size > 0


async def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    served = await servers.start()
    for path in (GENERATE, "/grpc.health.v1.Health/Check"):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(aiter(served.channel.unary_stream(path)(b"\x0a\xff\xff\xff\xff\x0f", timeout=30)))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text
    answer = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
