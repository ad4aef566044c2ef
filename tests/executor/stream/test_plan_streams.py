"""Plan streams over real gRPC: order, failures and cut streams."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.executor.messages import read
from tests.support.executor.plan_driver import ints
from tests.support.executor.served import open_stream, opening, plan, status

if TYPE_CHECKING:
    from quire.executor.v1 import executor_pb2 as pb


async def test_each_plan_gets_a_result_in_order(stub, fake_runner) -> None:
    call, epoch = await open_stream(stub)
    for step_id in range(1, 6):
        await call.write(plan(epoch, step_id))
    await call.done_writing()
    results = [await read(call) for _ in range(5)]
    assert [(result.epoch, result.step_id) for result in results] == [(epoch, step_id) for step_id in range(1, 6)]
    assert results[2].token_ids == ints(3).tobytes()
    assert results[0].timings.queue_ns > 0
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("plans", "num_results", "complaint"),
    [
        ([(1, 2)], 0, "step 2 where step 1 was due"),
        ([(1, 1), (1, 3)], 1, "step 3 where step 2 was due"),
        ([(1, 1), (1, 2), (1, 2)], 2, "step 2 where step 3 was due"),
        ([(1, 1), (2, 2)], 1, "epoch 2 in a stream of epoch 1"),
        ([(0, 1)], 0, "epoch 0 in a stream of epoch 1"),
        ([(2**64 - 1, 1)], 0, f"epoch {2**64 - 1} in a stream of epoch 1"),
    ],
)
async def test_plans_out_of_order_end_the_stream(plans, num_results, complaint, stub, fake_runner) -> None:
    """The results of earlier plans are delivered, and then the stream ends. The next stream is served."""
    call, _ = await open_stream(stub)
    for epoch, step_id in plans:
        await call.write(plan(epoch, step_id))
    for _ in range(num_results):
        await read(call)
    code, details = await status(call)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert complaint in details
    assert len(fake_runner.executed) == num_results
    call, epoch = await open_stream(stub, "another")
    await call.write(plan(epoch, 1))
    assert (await read(call)).epoch == epoch == 2
    call.cancel()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"retired_slots": ints(9).tobytes()}, "step 2: retired_slots: out of range"),
        ({"retired_slots": b"\0\0\0"}, "retired_slots: 3 bytes are not a whole number of int32"),
        ({"retired_slots": bytes(4 * 5)}, "retired_slots: 5 entries, where at most 4 make sense"),
    ],
)
async def test_a_bad_plan_ends_the_stream_but_not_the_executor(bad, complaint, stub, fake_runner) -> None:
    call, _ = await open_stream(stub)
    await call.write(plan(1, 1))
    await call.write(plan(1, 2, **bad))
    await call.write(plan(1, 3))
    assert (await read(call)).step_id == 1
    assert await status(call) == (grpc.StatusCode.INVALID_ARGUMENT, complaint)
    assert fake_runner.executed == [(1, 1)]
    call, epoch = await open_stream(stub)
    await call.write(plan(epoch, 1))
    assert (await read(call)).epoch == 2
    call.cancel()


async def test_a_second_opening_is_not_a_plan(stub, fake_runner) -> None:
    call, _ = await open_stream(stub)
    await call.write(opening())
    assert await status(call) == (grpc.StatusCode.INVALID_ARGUMENT, "a message without a plan")


async def test_an_exception_in_a_step_ends_the_stream_but_not_the_executor(stub, fake_runner) -> None:
    fake_runner.errors[2] = RuntimeError("boom")
    call, _ = await open_stream(stub)
    await call.write(plan(1, 1))
    await call.write(plan(1, 2))
    assert (await read(call)).step_id == 1
    assert await status(call) == (grpc.StatusCode.INTERNAL, "step 2: RuntimeError: boom")
    call, _ = await open_stream(stub)
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    assert fake_runner.num_resets == 2
    call.cancel()


async def test_a_cut_stream_leaves_the_executor_serving(stub, fake_runner, caplog) -> None:
    caplog.clear()
    fake_runner.gate.clear()
    call, _ = await open_stream(stub)
    await call.write(plan(1, 1))
    await call.write(plan(1, 2))
    await asyncio.sleep(0.05)
    call.cancel()
    fake_runner.gate.set()
    call, _ = await open_stream(stub)
    await call.write(plan(2, 1))
    assert (await read(call)).epoch == 2
    call.cancel()
    await asyncio.sleep(0.05)
    assert not caplog.records


async def test_plans_beyond_the_window_are_not_lost(stub, fake_runner) -> None:
    """The executor stops reading while the window is full."""
    fake_runner.gate.clear()
    call, _ = await open_stream(stub)
    for step_id in range(1, 41):
        await call.write(plan(1, step_id))
    fake_runner.gate.set()
    assert [(await read(call)).step_id for _ in range(40)] == list(range(1, 41))
    call.cancel()


async def test_a_plan_that_memory_is_too_short_for_ends_its_stream_only(stub, monkeypatch, caplog, counted) -> None:
    def too_large(message: pb.StepPlan) -> None:
        raise MemoryError

    call, epoch = await open_stream(stub)
    with monkeypatch.context() as patch:
        patch.setattr("executor.stream.servicer.plan_wire.plan_from_message", too_large)
        await call.write(plan(epoch, 1))
        assert await status(call) == (grpc.StatusCode.INTERNAL, "a plan could not be read: MemoryError()")
    assert "Traceback" in caplog.text
    assert counted() == {"plan": 1}
    call, epoch = await open_stream(stub)
    await call.write(plan(epoch, 1))
    assert (await read(call)).step_id == 1
