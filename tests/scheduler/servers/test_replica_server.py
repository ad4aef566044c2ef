"""A router hears the load of a scheduler, the digests of what it has cached, and the tenants of clients."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.v1 import generation_pb2, replica_pb2
from quire.v1 import replica_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from quire.v1.replica_pb2_grpc import ReplicaStub
from scheduler.core.prefix_index import PrefixIndex
from scheduler.core.tenants.account import TenantTerms
from scheduler.servers import replica_server
from scheduler.servers.arrivals import ROUTER, Arrivals
from tests.scheduler.servers.test_bounded_messages import COSTLY, field
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.many_calls import many_call
from tests.support.scheduler.servers import Served, Servers
from tests.support.waiting import WAIT_S, until


def index_of(served: Served) -> PrefixIndex:
    assert served.engine.core is not None
    return served.engine.core.state.cache.index


async def test_reports_begin_with_a_snapshot_and_follow_the_cache(servers: Servers) -> None:
    served = await servers.start()
    index = index_of(served)
    index.publish(1, bytes(range(32)))
    call = ReplicaStub(served.channel).Watch(pb.WatchRequest(router_id="r"))
    first = await call.read()
    assert first.snapshot.digests == bytes(range(8))
    assert (first.snapshot.scheme, first.snapshot.block_size) == (PrefixIndex.SCHEME, 16)
    assert first.load.state == generation_pb2.SERVER_STATE_SERVING
    index.publish(2, b"b" * 32)
    index.forget(1)
    second = await call.read()
    assert (second.events.published, second.events.forgotten) == (b"b" * 8, bytes(range(8)))
    assert second.events.first_sequence_number == 1
    call.cancel()


async def test_a_new_executor_and_a_drain_are_reported(servers: Servers) -> None:
    served = await servers.start()
    call = ReplicaStub(served.channel).Watch(pb.WatchRequest())
    await call.read()
    assert served.engine.core is not None
    served.engine.core.executor_attached(1, 4)  # begins with an empty cache
    assert (await call.read()).WhichOneof("prefixes") == "snapshot"
    draining = served.admin.Drain(replica_admin_drain())
    report = await call.read()
    while not report.load.moves_streams:
        report = await call.read()
    draining.cancel()
    await served.admin.Resume(_admin().ResumeRequest())
    while report.load.moves_streams:
        report = await call.read()
    call.cancel()


def _admin() -> Any:
    from quire.v1 import admin_pb2

    return admin_pb2


def replica_admin_drain() -> Any:
    return _admin().DrainRequest(move_streams=True)


async def test_a_router_learns_which_of_its_requests_a_report_contains(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.generation_server.MAX_STREAMS", 3)
    served = await servers.start()
    watching = {name: ReplicaStub(served.channel).Watch(pb.WatchRequest(router_id=name)) for name in ("one", "two")}
    for call in watching.values():
        assert (await call.read()).load.num_received == 0
    many = GenerationStub(served.channel).GenerateMany(metadata=((ROUTER, "one"),))
    for number, text in enumerate(("hello", "", "hello")):  # a request that is refused counts, too
        opening = generation_pb2.OpenStream(request=generation_pb2.GenerateRequest(text=text))
        await many.write(generation_pb2.GenerateManyRequest(stream_id=number, open=opening))
    costly = field(2, field(1, COSTLY["stop strings"]))  # it is refused before it is parsed
    await many.write(generation_pb2.GenerateManyRequest.FromString(b"\x08\x03" + costly))
    for number in (4, 5, 6):  # the last ones exceed the number of streams
        opening = generation_pb2.OpenStream(request=generation_pb2.GenerateRequest(text="hello"))
        await many.write(generation_pb2.GenerateManyRequest(stream_id=number, open=opening))
    report = await watching["one"].read()
    while report.load.num_received < 7:
        report = await watching["one"].read()
    assert report.load.num_received == 7
    late = ReplicaStub(served.channel).Watch(pb.WatchRequest(router_id="one"))
    assert (await late.read()).load.num_received == 0, "it counts from its beginning"
    for call in (many, late, *watching.values()):
        call.cancel()


async def test_clients_that_may_not_watch_are_no_routers(servers: Servers, tmp_path: Path) -> None:
    """Otherwise the reports to a router could contain requests that it has not sent."""
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())

    async def send(caller: str, router: str) -> None:
        async with many_call(served.generation, (*callers.metadata(caller), (ROUTER, router))) as call:
            await call.open(1, generation_pb2.GenerateRequest())
            await call.end_of(1)

    watch = ReplicaStub(served.channel).Watch(pb.WatchRequest(router_id="one"), metadata=callers.metadata("observe"))
    await watch.read()
    for caller, router in (("admin", "one"), ("generate", "one"), ("admin", "one")):
        await send(caller, router)
    async with asyncio.timeout(WAIT_S):
        while (await watch.read()).load.num_received != 2:
            pass
    watch.cancel()


def test_routers_that_do_not_watch_have_no_others_forgotten() -> None:
    """The reports to a router missed requests if 256 other names had come: those of callers, or of new gateways."""
    arrivals = Arrivals()
    with arrivals.watched("one") as num_received:
        arrivals.counter("one")()
        for i in range(1000):
            arrivals.counter(f"router {i}")()
        arrivals.counter(b"bytes")()
        arrivals.counter("one")()
        assert num_received() == 2
        with arrivals.watched("one") as num_later:
            arrivals.counter("one")()
            assert (num_received(), num_later()) == (3, 1)
    assert not arrivals._numbers


async def test_too_many_watches_and_a_long_id_are_refused(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_server, "MAX_WATCHES", 2)
    served = await servers.start()
    stub = ReplicaStub(served.channel)
    calls = [stub.Watch(pb.WatchRequest()) for _ in range(2)]
    for call in calls:
        await call.read()
    for request, code in (
        (pb.WatchRequest(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (pb.WatchRequest(router_id="x" * 65), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Watch(request).read()
        assert error.value.code() is code
    calls[0].cancel()

    async def has_room() -> bool:
        call = stub.Watch(pb.WatchRequest())
        try:
            return await call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()

    await until(has_room, interval_s=0.05)
    calls[1].cancel()


async def test_an_unread_watch_does_not_stop_the_others(servers: Servers) -> None:
    served = await servers.start()
    index = index_of(served)
    stalled = ReplicaStub(served.channel).Watch(pb.WatchRequest())
    call = ReplicaStub(served.channel).Watch(pb.WatchRequest())
    await call.read()
    for i in range(5):
        index.publish(i, bytes([i]) * 32)
        assert (await call.read()).events.published == bytes([i]) * 8
        await asyncio.sleep(0)
    for each in (call, stalled):
        each.cancel()


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ("none", grpc.StatusCode.UNAUTHENTICATED),
        ("wrong", grpc.StatusCode.UNAUTHENTICATED),
        ("observe", grpc.StatusCode.PERMISSION_DENIED),
        ("generate", "tenant-of-generate"),
        ("admin", "tenant-of-admin"),
    ],
)
async def test_tenants_are_told_as_generate_decides(
    client: str, expected: object, servers: Servers, tmp_path: Path
) -> None:
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    request = replica_pb2.IdentifyRequest(authorization=callers.header(client).get("authorization", ""))
    try:
        answer = await ReplicaStub(served.channel).Identify(request, metadata=callers.metadata("observe"))
        found: object = answer.tenant
    except grpc.aio.AioRpcError as error:
        found = error.code()
    assert found == expected


async def test_the_terms_of_a_tenant_are_told(servers: Servers, tmp_path: Path) -> None:
    callers = Callers(tmp_path)
    terms = {"tenant-of-generate": TenantTerms(weight=2.5, priority=-1)}
    served = await servers.start(access=callers.access(), terms_of=lambda tenant: terms[tenant])
    request = replica_pb2.IdentifyRequest(authorization=callers.header("generate")["authorization"])
    answer = await ReplicaStub(served.channel).Identify(request, metadata=callers.metadata("observe"))
    assert (answer.weight, answer.priority) == (2.5, -1)
