"""The server over real gRPC: description, health, hangs, addresses and metrics."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor.server import Server
from quire.addresses import AddressInUse, with_port
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from quire.plan_stream import FEATURES, LEAST_PROTOCOL_VERSION, OPTIONAL_FEATURES, PROTOCOL_VERSION
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.executor.messages import read
from tests.support.executor.served import CONFIG, open_stream, plan, status
from tests.support.waiting import until


async def test_describe_returns_model_and_limits(stub) -> None:
    first, again = await stub.Describe(pb.DescribeRequest()), await stub.Describe(pb.DescribeRequest())
    assert first == again
    assert len(first.incarnation) == 32
    assert (first.model_name, first.dtype, first.device) == ("fake", "float32", "cpu")
    assert (first.vocab_size, first.max_model_len, first.block_size) == (100, 64, 4)
    assert (first.num_blocks, first.max_num_seqs, first.max_num_batched_tokens) == (33, 4, 32)
    assert (first.protocol_version, tuple(first.features)) == (PROTOCOL_VERSION, FEATURES + OPTIONAL_FEATURES)
    assert first.least_protocol_version == LEAST_PROTOCOL_VERSION


async def test_each_server_has_its_own_incarnation(server) -> None:
    other = Server(CONFIG, loaded(FakeRunner()))
    assert other._servicer._description.incarnation != server._servicer._description.incarnation
    await other.stop()


async def test_describe_is_not_answered_while_the_device_hangs(stub, fake_runner) -> None:
    fake_runner.gate.clear()
    call, _ = await open_stream(stub)
    await call.write(plan(1, 1))
    assert await asyncio.to_thread(fake_runner.entered.wait, 30)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Describe(pb.DescribeRequest(), timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    fake_runner.gate.set()
    assert (await stub.Describe(pb.DescribeRequest())).model_name == "fake"
    call.cancel()


async def test_an_executor_that_hangs_stops_serving(fake_runner) -> None:
    server = Server(replace(CONFIG, step_timeout_s=0.1), loaded(fake_runner))
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        call, _ = await open_stream(ExecutorStub(channel))
        fake_runner.gate.clear()
        await call.write(plan(1, 1))
        assert await asyncio.wait_for(server.wait(), 20) is False
        stopping = asyncio.create_task(server.stop())
        assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE
        await stopping
    fake_runner.gate.set()


async def test_an_idle_executor_keeps_serving(fake_runner) -> None:
    server = Server(replace(CONFIG, step_timeout_s=0.1), loaded(fake_runner))
    await server.start()
    waiting = asyncio.create_task(server.wait())
    await asyncio.sleep(0.5)
    assert not waiting.done()
    server.end()
    assert await waiting is True
    await server.stop()


async def test_health_follows_the_device(channel, fake_runner) -> None:
    """The status is NOT_SERVING while a step hangs, and SERVING again afterwards."""
    server = Server(replace(CONFIG, step_timeout_s=0.2), loaded(fake_runner))
    address = await server.start()
    waiting = asyncio.create_task(server.wait())
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="quire.executor.v1.Executor"))
        statuses = health_pb2.HealthCheckResponse

        async def next_status() -> int:
            return (await asyncio.wait_for(watch.read(), 20)).status

        assert await next_status() == statuses.SERVING
        fake_runner.gate.clear()
        call, _ = await open_stream(ExecutorStub(channel))
        await call.write(plan(1, 1))
        assert await next_status() == statuses.NOT_SERVING
        fake_runner.gate.set()
        assert await next_status() == statuses.SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == statuses.SERVING
        call.cancel()
        watch.cancel()
    server.end()
    assert await waiting is True
    await server.stop()


async def test_a_lost_device_ends_the_server(fake_runner, monkeypatch) -> None:
    monkeypatch.setattr("executor.server.device_is_sane", lambda device: False)
    fake_runner.errors[1] = RuntimeError("gone")
    server = Server(CONFIG, loaded(fake_runner))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call, _ = await open_stream(ExecutorStub(channel))
        await call.write(plan(1, 1))
        assert (await status(call))[0] is grpc.StatusCode.INTERNAL
        assert await asyncio.wait_for(server.wait(), 20) is False
    await server.stop()


async def test_shutting_down_does_not_wait_for_a_device_that_hangs(fake_runner) -> None:
    server = Server(replace(CONFIG, step_timeout_s=0.2), loaded(fake_runner))
    address = await server.start()
    fake_runner.gate.clear()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call, _ = await open_stream(ExecutorStub(channel))
            await call.write(plan(1, 1))
            await until(fake_runner.entered.is_set)
            server.end()
            await asyncio.wait_for(server.stop(), 60)
            call.cancel()
        assert server.device_lost
    finally:
        fake_runner.gate.set()


async def test_a_device_that_hangs_is_lost_without_a_standard_error(fake_runner, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("sys.stderr is None")

    monkeypatch.setattr("faulthandler.dump_traceback", fail)
    server = Server(CONFIG, loaded(fake_runner))
    server._device_hangs()
    assert server.device_lost
    server._device.stop()


async def test_the_largest_limits_do_not_exceed_what_grpc_takes(fake_runner) -> None:
    fake_runner.limits = replace(fake_runner.limits, max_num_seqs=1 << 20, max_model_len=1 << 20)
    server = Server(CONFIG, loaded(fake_runner))
    await server.start()
    await server.stop()


async def test_shutting_down_ends_streams(stub, server) -> None:
    call, _ = await open_stream(stub)
    await call.write(plan(1, 1))
    await read(call)
    await server.stop()
    assert await status(call) == (grpc.StatusCode.UNAVAILABLE, "the executor is shutting down")


async def test_reflection_lists_the_services(channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = await asyncio.wait_for(call.read(), 10)
    call.cancel()
    names = {service.name for service in listed.list_services_response.service}
    assert {"quire.executor.v1.Executor", "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_reported(server, fake_runner) -> None:
    second = Server(replace(CONFIG, listen_address=server.address), loaded(fake_runner))
    with pytest.raises(AddressInUse, match=f"cannot listen on {server.address}"):
        await second.start()
    await second.stop()


async def test_the_server_listens_on_a_unix_socket(fake_runner, tmp_path) -> None:
    server = Server(replace(CONFIG, listen_address=f"unix:{tmp_path}/executor"), loaded(fake_runner))
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await ExecutorStub(channel).Describe(pb.DescribeRequest())).model_name == "fake"
    await server.stop()


async def test_metrics_are_served_over_http(stub, server) -> None:
    call, _ = await open_stream(stub)
    await call.write(plan(1, 1))
    await read(call)
    call.cancel()
    address = with_port("127.0.0.1:0")
    server.metrics.serve(address, lambda: 0.0)
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())
    page = page.replace(f'executor="{server.address}",', "")
    assert 'quire_executor_step_duration_seconds_count{model_name="fake",phase="forward"} 1.0' in page
    assert 'quire_executor_memory_bytes{kind="kv_pool",model_name="fake"} 20.0' in page
    assert 'quire_executor_startup_seconds{model_name="fake",phase="weights"} 0.5' in page
    assert 'quire_executor_last_step_timestamp_seconds{model_name="fake"} 1' in page
    assert 'quire_executor_idle_ratio{model_name="fake"}' in page


async def test_healthz_fails_while_the_event_loop_hangs_and_not_while_a_step_computes(fake_runner, monkeypatch) -> None:
    monkeypatch.setattr("executor.metrics_server.STUCK_AFTER_S", 1.0)
    address = with_port("127.0.0.1:0")
    server = Server(replace(CONFIG, metrics_address=address), loaded(fake_runner))

    def status_after(delay_s: float) -> int:
        time.sleep(delay_s)
        try:
            return int(urllib.request.urlopen(f"http://{address}/healthz", timeout=30).status)
        except urllib.error.HTTPError as error:
            return error.code

    async with grpc.aio.insecure_channel(await server.start()) as channel:
        fake_runner.gate.clear()
        call, _ = await open_stream(ExecutorStub(channel))
        await call.write(plan(1, 1))
        assert await asyncio.to_thread(fake_runner.entered.wait, 30)
        assert await asyncio.to_thread(status_after, 1.5) == 200
        fake_runner.gate.set()
        asking = asyncio.create_task(asyncio.to_thread(status_after, 2.0))
        await asyncio.sleep(0)
        time.sleep(3.0)  # noqa: ASYNC251  # hangs the loop
        assert await asking == 503
        assert await asyncio.to_thread(status_after, 0.0) == 200
        call.cancel()
    await server.stop()
