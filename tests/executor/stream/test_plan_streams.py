"""Plan streams over real gRPC: order, epochs, failures, takeovers and cut streams."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from quire.executor.v1 import executor_pb2 as pb
from tests.support.executor.messages import read
from tests.support.executor.plan_driver import ints
from tests.support.executor.served import plan, status


async def test_each_plan_gets_a_result_in_order(stub, fake_runner) -> None:
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
async def test_plans_out_of_order_end_the_stream(plans, num_results, complaint, stub, fake_runner) -> None:
    """The results of earlier plans are delivered, and then the stream ends."""
    call = stub.Run()
    for epoch, step_id in plans:
        await call.write(plan(epoch, step_id))
    for _ in range(num_results):
        await read(call)
    code, details = await status(call)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert complaint in details
    assert len(fake_runner.executed) == num_results


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"retired_slots": ints(9).tobytes()}, "step 2: retired_slots: out of range"),
        ({"retired_slots": b"\0\0\0"}, "retired_slots: 3 bytes are not a whole number of int32"),
    ],
)
async def test_a_bad_plan_ends_the_stream_but_not_the_executor(bad, complaint, stub, fake_runner) -> None:
    call = stub.Run()
    await call.write(plan(1, 1))
    await call.write(plan(1, 2, **bad))
    await call.write(plan(1, 3))
    assert (await read(call)).step_id == 1
    assert await status(call) == (grpc.StatusCode.INVALID_ARGUMENT, complaint)
    assert fake_runner.executed == [(1, 1)]
    call = stub.Run()
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    call.cancel()


async def test_an_exception_in_a_step_ends_the_stream_but_not_the_executor(stub, fake_runner) -> None:
    fake_runner.errors[2] = RuntimeError("boom")
    call = stub.Run()
    await call.write(plan(1, 1))
    await call.write(plan(1, 2))
    assert (await read(call)).step_id == 1
    assert await status(call) == (grpc.StatusCode.INTERNAL, "step 2: RuntimeError: boom")
    call = stub.Run()
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    assert fake_runner.num_resets == 2
    call.cancel()


async def test_a_newer_epoch_takes_over(stub, fake_runner) -> None:
    old, new = stub.Run(), stub.Run()
    await old.write(plan(1, 1))
    await read(old)
    await new.write(plan(4, 1))
    assert (await read(new)).epoch == 4
    assert await status(old) == (grpc.StatusCode.ABORTED, "epoch 4 took over")
    await new.write(plan(4, 2))
    assert (await read(new)).step_id == 2
    new.cancel()


async def test_a_takeover_ends_the_old_stream_while_a_step_runs(stub, fake_runner) -> None:
    """The old stream ends at once, and its queued plans are not run."""
    old, new = stub.Run(), stub.Run()
    await old.write(plan(1, 1))
    await read(old)
    fake_runner.gate.clear()
    await old.write(plan(1, 2))
    await old.write(plan(1, 3))
    await asyncio.sleep(0.1)
    await new.write(plan(2, 1))
    assert await status(old) == (grpc.StatusCode.ABORTED, "epoch 2 took over")
    fake_runner.gate.set()
    assert (await read(new)).epoch == 2
    assert fake_runner.executed[-1] == (2, 1)
    new.cancel()


async def test_a_cut_stream_leaves_the_executor_serving(stub, fake_runner, caplog) -> None:
    fake_runner.gate.clear()
    call = stub.Run()
    await call.write(plan(1, 1))
    await call.write(plan(1, 2))
    await asyncio.sleep(0.05)
    call.cancel()
    fake_runner.gate.set()
    call = stub.Run()
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    call.cancel()
    await asyncio.sleep(0.05)
    assert not caplog.records


async def test_plans_beyond_the_window_are_not_lost(stub, fake_runner) -> None:
    """The executor stops reading while the window is full."""
    fake_runner.gate.clear()
    call = stub.Run()
    for step_id in range(1, 41):
        await call.write(plan(1, step_id))
    fake_runner.gate.set()
    assert [(await read(call)).step_id for _ in range(40)] == list(range(1, 41))
    call.cancel()
