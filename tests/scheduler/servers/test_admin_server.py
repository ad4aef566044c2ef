"""The admin service, health checks and reflection."""

import asyncio
import socket
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.addresses import AddressError, AddressInUse, AddressUnusable
from quire.v1 import admin_pb2 as pb
from quire.v1 import generation_pb2
from scheduler.engine.engine import ServerState
from tests.support.core.letter_tokens import make_request
from tests.support.core.small_harness import build_harness
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.fake_engine import MODEL, FakeEngine
from tests.support.scheduler.servers import Served, Servers
from tests.support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_server_info_describes_the_model(servers: Servers) -> None:
    served = await servers.start()
    info = await served.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
    for name in (
        "model_name",
        "max_model_len",
        "vocab_size",
        "block_size",
        "num_blocks",
        "max_num_seqs",
        "dtype",
    ):
        assert getattr(info, name) == getattr(MODEL, name)
    assert info.max_num_batched_tokens == 64
    assert info.policy == "fcfs"
    assert info.version
    assert info.state == generation_pb2.SERVER_STATE_SERVING
    served.engine.become(ServerState.WAITING_FOR_EXECUTOR)
    info = await served.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
    assert info.state == generation_pb2.SERVER_STATE_WAITING_FOR_EXECUTOR


async def test_server_info_tells_what_waits_and_what_was_computed(servers: Servers) -> None:
    """Three prompts of 9 tokens in blocks of 4: the third one waits for a slot, the second finds 8 tokens cached."""
    requests = [make_request(number, "abcdabcda", max_tokens=1) for number in (1, 2, 3)]
    harness = build_harness(*requests, block_size=4, max_num_seqs=1)
    served = await servers.start()
    served.engine.core = harness.scheduler

    async def counts() -> tuple[int, int]:
        info = await served.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
        return info.num_waiting_prompt_tokens, info.num_computed_prompt_tokens

    assert await counts() == (27, 0)
    served.engine.oldest_waiting_s = 1.5
    info = await served.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
    assert info.oldest_waiting_s == 1.5
    for expected in ((18, 9), (9, 10), (0, 11)):
        harness.schedule()
        harness.commit()
        assert await counts() == expected


@pytest.mark.parametrize(("caller", "expected"), [("generate", (0, 0.0)), ("observe", (27, 1.5)), ("admin", (27, 1.5))])
async def test_only_observers_learn_the_sizes_of_all_requests(
    servers: Servers, tmp_path: Path, caller: str, expected: tuple[int, float]
) -> None:
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    requests = [make_request(number, "abcdabcda", max_tokens=1) for number in (1, 2, 3)]
    served.engine.core = build_harness(*requests, block_size=4, max_num_seqs=1).scheduler
    served.engine.oldest_waiting_s = 1.5
    metadata = callers.metadata(caller)
    info = await served.generation.GetServerInfo(generation_pb2.GetServerInfoRequest(), metadata=metadata)
    assert (info.num_waiting_prompt_tokens, info.oldest_waiting_s) == expected
    assert info.num_waiting == 3


async def test_calls_are_unavailable_before_a_model_is_known(servers: Servers) -> None:
    served = await servers.start(FakeEngine(model=None))
    calls = (
        served.generation.GetServerInfo(generation_pb2.GetServerInfoRequest()),
        served.admin.GetBlockMap(pb.GetBlockMapRequest()),
        served.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest()),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_block_map_has_client_request_ids(servers: Servers) -> None:
    served = await servers.start()
    named = served.generation.Generate(generation_pb2.GenerateRequest(text="a", request_id="mine"))
    await served.engine.next_request()
    unnamed = served.generation.Generate(generation_pb2.GenerateRequest(text="a"))
    await served.engine.next_request()
    block_map = await served.admin.GetBlockMap(pb.GetBlockMapRequest())
    assert [(run.state, run.ref_count, run.num_hits, run.length) for run in block_map.blocks] == [
        (pb.BLOCK_STATE_ACTIVE, 2, 0, 1),
        (pb.BLOCK_STATE_CACHED, 0, 3, 1),
        (pb.BLOCK_STATE_FREE, 0, 0, 40),
    ]
    assert [sequence.request_id for sequence in block_map.sequences] == ["mine", "quire-2"]
    sequence = block_map.sequences[0]
    assert (sequence.slot, sequence.num_tokens, sequence.num_computed_tokens, sequence.num_prompt_tokens) == (
        -1,
        5,
        4,
        3,
    )
    assert list(sequence.block_table) == [2, 1]
    assert (block_map.num_waiting, block_map.num_waiting_prompt_tokens, block_map.step_id) == (7, 70, 12)
    assert (block_map.num_preemptions, block_map.num_cow_copies, block_map.block_size) == (5, 6, 16)
    assert block_map.num_running == 2
    summary = await served.admin.GetBlockMap(pb.GetBlockMapRequest(summary_only=True))
    assert not summary.blocks
    assert not summary.sequences
    assert (
        summary.summary
        == block_map.summary
        == pb.PoolSummary(
            num_free_blocks=1, num_cached_blocks=1, num_active_blocks=1, num_used_slots=12, num_wasted_slots=4
        )
    )
    named.cancel()
    unnamed.cancel()


async def test_reset_prefix_cache_returns_the_number_of_blocks(servers: Servers) -> None:
    served = await servers.start()
    assert (await served.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())).num_blocks == 9


async def test_drain_waits_for_running_requests_and_refuses_new_ones(servers: Servers) -> None:
    served = await servers.start()
    running = served.generation.Generate(generation_pb2.GenerateRequest(text="a"))
    submitted = (await served.engine.next_request()).start()
    drain = asyncio.ensure_future(served.admin.Drain(pb.DrainRequest()))
    await until(lambda: served.engine.state is ServerState.DRAINING)
    refused = served.generation.Generate(generation_pb2.GenerateRequest(text="a"))
    assert await refused.code() is grpc.StatusCode.UNAVAILABLE
    assert not drain.done()
    submitted.finish()
    assert [message async for message in running][-1].HasField("finished")
    await drain


async def test_resume_undoes_a_drain_and_ends_the_call_that_waits(servers: Servers) -> None:
    served = await servers.start()
    running = served.generation.Generate(generation_pb2.GenerateRequest(text="a"))
    submitted = (await served.engine.next_request()).start()
    drain = asyncio.ensure_future(served.admin.Drain(pb.DrainRequest()))
    await until(lambda: served.engine.state is ServerState.DRAINING)
    await served.admin.Resume(pb.ResumeRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert served.engine.state is ServerState.SERVING
    again = served.generation.Generate(generation_pb2.GenerateRequest(text="a"))
    (await served.engine.next_request()).start().finish()
    submitted.finish()
    for stream in (running, again):
        assert [message async for message in stream][-1].HasField("finished")


async def check_health(served: Served, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(served.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


@pytest.mark.parametrize("service", ["", "quire.v1.Generation"])
async def test_health_follows_the_engine(servers: Servers, service: str) -> None:
    engine = FakeEngine()
    engine.become(ServerState.WAITING_FOR_EXECUTOR)
    served = await servers.start(engine)
    assert await check_health(served, service) == NOT_SERVING
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=service))
    assert (await watch.read()).status == NOT_SERVING
    engine.become(ServerState.SERVING)
    assert (await watch.read()).status == SERVING
    assert await check_health(served, service) == SERVING
    engine.become(ServerState.DRAINING)
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_reflection_lists_all_services(servers: Servers) -> None:
    served = await servers.start()
    call = reflection_pb2_grpc.ServerReflectionStub(served.admin_channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response = await call.read()
    await call.done_writing()
    names = {service.name for service in response.list_services_response.service}
    assert {"quire.v1.Generation", "quire.v1.Admin", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("listen", "error"),
    [
        ("192.0.2.1:1234", AddressUnusable),
        ("nonsense", AddressError),
        ("unix:/dev/null/dir/x.sock", AddressUnusable),
    ],
)
async def test_bad_addresses_are_refused(servers: Servers, listen: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await servers.start(listen=listen)


async def test_address_in_use_is_refused(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(AddressInUse, match="in use"):
            await servers.start(listen=f"127.0.0.1:{taken.getsockname()[1]}")
    first = await servers.start()
    with pytest.raises(AddressInUse):  # gRPC would share the port by default
        await servers.start(listen=first.server.address)
    path = f"unix:{tmp_path_factory.mktemp('s')}/x.sock"
    await servers.start(listen=path)
    with pytest.raises(AddressInUse):  # gRPC would replace the first server's socket file
        await servers.start(listen=path)


async def test_a_socket_file_is_this_users_and_its_directory_need_not_exist(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The schedulers of `quire serve --replicas` are the first to use the private directory."""
    path = tmp_path_factory.mktemp("s") / "new" / "x.sock"
    await servers.start(listen=f"unix:{path}")
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path)] == [0o700, 0o600]


async def test_stale_socket_file_is_replaced(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "x.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    served = await servers.start(listen=f"unix:{path}")
    assert await check_health(served, "") == SERVING
