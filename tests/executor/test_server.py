"""The service over real gRPC: description, order, epochs, failures, takeovers and cut streams."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor.config import ExecutorConfig
from executor.server import Server
from quire.addresses import AddressInUse, with_port
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.executor.messages import read
from tests.support.executor.plan_driver import ints

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONFIG = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
async def server(runner) -> AsyncIterator[Server]:
    server = Server(CONFIG, loaded(runner))
    server.address = await server.start()
    yield server
    runner.gate.set()
    await server.stop()


@pytest.fixture
async def channel(server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel) -> ExecutorStub:
    return ExecutorStub(channel)


def plan(epoch: int, step_id: int, **fields) -> pb.StepPlan:
    return pb.StepPlan(epoch=epoch, step_id=step_id, **fields)


async def status(call) -> tuple[grpc.StatusCode, str]:
    """Reads all results and returns the status of the call."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


async def test_describe(stub) -> None:
    first, again = await stub.Describe(pb.DescribeRequest()), await stub.Describe(pb.DescribeRequest())
    assert first == again
    assert len(first.incarnation) == 32
    assert (first.model_name, first.dtype, first.device) == ("fake", "float32", "cpu")
    assert (first.vocab_size, first.max_model_len, first.block_size) == (100, 64, 4)
    assert (first.num_blocks, first.max_num_seqs, first.max_num_batched_tokens) == (33, 4, 32)
    assert (first.kv_bytes_per_token, first.epoch) == (256, 0)


async def test_incarnations_differ(server) -> None:
    other = Server(CONFIG, loaded(FakeRunner()))
    assert other._describe(0).incarnation != server._describe(0).incarnation
    await other.stop()


async def test_plans_and_results(stub, runner) -> None:
    call = stub.Run()
    for step_id in range(1, 6):
        await call.write(plan(9, step_id))
    await call.done_writing()
    results = [await read(call) for _ in range(5)]
    assert [(result.epoch, result.step_id) for result in results] == [(9, step_id) for step_id in range(1, 6)]
    assert results[2].token_ids == ints(3).tobytes()
    assert results[0].timings.queue_ns > 0
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert (await stub.Describe(pb.DescribeRequest())).epoch == 9


async def test_an_old_epoch_is_refused(stub) -> None:
    first = stub.Run()
    await first.write(plan(5, 1))
    await read(first)
    for epoch in (5, 4):
        call = stub.Run()
        await call.write(plan(epoch, 1))
        code, details = await status(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"epoch {epoch} is old: the last one was 5"
    await first.write(plan(5, 2))
    assert (await read(first)).step_id == 2, "the stream that has the device continues"
    first.cancel()


@pytest.mark.parametrize(
    ("plans", "num_results", "complaint"),
    [
        ([(1, 2)], 0, "step 2 where step 1 was due"),
        ([(1, 1), (1, 3)], 1, "step 3 where step 2 was due"),
        ([(1, 1), (1, 2), (1, 2)], 2, "step 2 where step 3 was due"),
        ([(1, 1), (2, 2)], 1, "epoch 2 in a stream of epoch 1"),
        ([(0, 1)], 0, "epoch 0 is old"),
    ],
)
async def test_plans_out_of_order_end_the_stream(plans, num_results, complaint, stub, runner) -> None:
    """The results of earlier plans are delivered, and then the stream ends."""
    call = stub.Run()
    for epoch, step_id in plans:
        await call.write(plan(epoch, step_id))
    for _ in range(num_results):
        await read(call)
    code, details = await status(call)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert complaint in details
    assert len(runner.executed) == num_results


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"retired_slots": ints(9).tobytes()}, "step 2: retired_slots: out of range"),
        ({"retired_slots": b"\0\0\0"}, "retired_slots: 3 bytes are no whole number of int32"),
    ],
)
async def test_a_bad_plan_ends_the_stream_but_not_the_executor(bad, complaint, stub, runner) -> None:
    call = stub.Run()
    await call.write(plan(1, 1))
    await call.write(plan(1, 2, **bad))
    await call.write(plan(1, 3))
    assert (await read(call)).step_id == 1
    assert await status(call) == (grpc.StatusCode.INVALID_ARGUMENT, complaint)
    assert runner.executed == [(1, 1)]
    call = stub.Run()
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    call.cancel()


async def test_an_exception_in_a_step_ends_the_stream_but_not_the_executor(stub, runner) -> None:
    runner.errors[2] = RuntimeError("boom")
    call = stub.Run()
    await call.write(plan(1, 1))
    await call.write(plan(1, 2))
    assert (await read(call)).step_id == 1
    assert await status(call) == (grpc.StatusCode.INTERNAL, "step 2: RuntimeError: boom")
    call = stub.Run()
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    assert runner.num_resets == 2
    call.cancel()


async def test_a_newer_epoch_takes_over(stub, runner) -> None:
    old, new = stub.Run(), stub.Run()
    await old.write(plan(1, 1))
    await read(old)
    await new.write(plan(4, 1))
    assert (await read(new)).epoch == 4
    assert await status(old) == (grpc.StatusCode.ABORTED, "epoch 4 took over")
    await new.write(plan(4, 2))
    assert (await read(new)).step_id == 2
    new.cancel()


async def test_takeover_while_a_step_runs(stub, runner) -> None:
    """The old stream ends at once, and its queued plans are not run."""
    old, new = stub.Run(), stub.Run()
    await old.write(plan(1, 1))
    await read(old)
    runner.gate.clear()
    await old.write(plan(1, 2))
    await old.write(plan(1, 3))
    await asyncio.sleep(0.1)
    await new.write(plan(2, 1))
    assert await status(old) == (grpc.StatusCode.ABORTED, "epoch 2 took over")
    runner.gate.set()
    assert (await read(new)).epoch == 2
    assert runner.executed[-1] == (2, 1)
    new.cancel()


async def test_a_cut_stream_leaves_the_executor_serving(stub, runner, caplog) -> None:
    runner.gate.clear()
    call = stub.Run()
    await call.write(plan(1, 1))
    await call.write(plan(1, 2))
    await asyncio.sleep(0.05)
    call.cancel()
    runner.gate.set()
    call = stub.Run()
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    call.cancel()
    await asyncio.sleep(0.05)
    assert not caplog.records


async def test_plans_beyond_the_window_are_not_lost(stub, runner) -> None:
    """The executor stops reading while the window is full."""
    runner.gate.clear()
    call = stub.Run()
    for step_id in range(1, 41):
        await call.write(plan(1, step_id))
    runner.gate.set()
    assert [(await read(call)).step_id for _ in range(40)] == list(range(1, 41))
    call.cancel()


async def test_describe_is_not_answered_while_the_device_hangs(stub, runner) -> None:
    runner.gate.clear()
    call = stub.Run()
    await call.write(plan(1, 1))
    assert await asyncio.to_thread(runner.entered.wait, 30)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Describe(pb.DescribeRequest(), timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    runner.gate.set()
    assert (await stub.Describe(pb.DescribeRequest())).epoch == 1
    call.cancel()


async def test_an_executor_that_hangs_stops_serving(runner) -> None:
    server = Server(replace(CONFIG, step_timeout_s=0.1), loaded(runner))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        call = ExecutorStub(channel).Run()
        runner.gate.clear()
        await call.write(plan(1, 1))
        assert await asyncio.wait_for(server.wait(), 20) is False
        stopping = asyncio.create_task(server.stop())
        assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE
        await stopping
    runner.gate.set()


async def test_an_idle_executor_keeps_serving(runner) -> None:
    server = Server(replace(CONFIG, step_timeout_s=0.1), loaded(runner))
    await server.start()
    waiting = asyncio.create_task(server.wait())
    await asyncio.sleep(0.5)
    assert not waiting.done()
    server.end()
    assert await waiting is True
    await server.stop()


async def test_health_follows_the_device(channel, runner) -> None:
    """The status is NOT_SERVING while a step hangs, and SERVING again afterwards."""
    server = Server(replace(CONFIG, step_timeout_s=0.2), loaded(runner))
    address = await server.start()
    waiting = asyncio.create_task(server.wait())
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="quire.executor.v1.Executor"))
        statuses = health_pb2.HealthCheckResponse

        async def next_status() -> int:
            return (await asyncio.wait_for(watch.read(), 20)).status

        assert await next_status() == statuses.SERVING
        runner.gate.clear()
        call = ExecutorStub(channel).Run()
        await call.write(plan(1, 1))
        assert await next_status() == statuses.NOT_SERVING
        runner.gate.set()
        assert await next_status() == statuses.SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == statuses.SERVING
        call.cancel()
        watch.cancel()
    server.end()
    assert await waiting is True
    await server.stop()


async def test_a_lost_device_ends_the_server(runner, monkeypatch) -> None:
    monkeypatch.setattr("executor.server.device_is_sane", lambda device: False)
    runner.errors[1] = RuntimeError("gone")
    server = Server(CONFIG, loaded(runner))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = ExecutorStub(channel).Run()
        await call.write(plan(1, 1))
        assert (await status(call))[0] is grpc.StatusCode.INTERNAL
        assert await asyncio.wait_for(server.wait(), 20) is False
    await server.stop()


async def test_shutting_down_ends_streams(stub, server) -> None:
    call = stub.Run()
    await call.write(plan(1, 1))
    await read(call)
    await server.stop()
    assert await status(call) == (grpc.StatusCode.UNAVAILABLE, "the executor is shutting down")


async def test_reflection(channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = await read(call)
    call.cancel()
    names = {service.name for service in listed.list_services_response.service}
    assert {"quire.executor.v1.Executor", "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_reported(server, runner) -> None:
    second = Server(replace(CONFIG, listen_address=server.address), loaded(runner))
    with pytest.raises(AddressInUse, match=f"cannot listen on {server.address}"):
        await second.start()
    await second.stop()


async def test_a_unix_socket(runner, tmp_path) -> None:
    server = Server(replace(CONFIG, listen_address=f"unix:{tmp_path}/executor"), loaded(runner))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await ExecutorStub(channel).Describe(pb.DescribeRequest())).model_name == "fake"
    await server.stop()


async def test_metrics_over_http(stub, server) -> None:
    call = stub.Run()
    await call.write(plan(1, 1))
    await read(call)
    call.cancel()
    address = with_port("127.0.0.1:0")
    server.metrics.serve(address)
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())
    page = page.replace(f'executor="{server.address}",', "")
    assert 'quire_executor_step_duration_seconds_count{model_name="fake",phase="forward"} 1.0' in page
    assert 'quire_executor_memory_bytes{kind="kv_pool",model_name="fake"} 20.0' in page
    assert 'quire_executor_startup_seconds{model_name="fake",phase="weights"} 0.5' in page
    assert 'quire_executor_last_step_timestamp_seconds{model_name="fake"} 1' in page
    assert 'quire_executor_idle_ratio{model_name="fake"}' in page
