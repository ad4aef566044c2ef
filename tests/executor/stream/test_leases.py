"""Leases over real gRPC: grants, refusals and takeovers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from executor.stream import servicer
from quire.executor.v1 import executor_pb2 as pb
from quire.plan_stream import FEATURES, PROTOCOL_VERSION
from tests.support.executor.messages import read
from tests.support.executor.served import open_stream, opening, plan, status


async def refusal(stub, *messages: pb.RunRequest) -> tuple[grpc.StatusCode, str]:
    """Returns the status of a stream that begins with these messages."""
    call = stub.Run()
    for message in messages:
        await call.write(message)
    return await status(call)


async def test_another_scheduler_is_refused_while_the_stream_of_the_holder_is_open(stub, fake_runner) -> None:
    mine, epoch = await open_stream(stub, "one")
    for _ in range(3):
        code, details = await refusal(stub, opening("two"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "serves another scheduler, scheduler one: stop that scheduler" in details
    await mine.write(plan(epoch, 1))
    assert (await read(mine)).step_id == 1
    mine.cancel()
    await asyncio.wait_for(mine.code(), 10)
    await asyncio.sleep(0.2)  # until the executor has seen the end
    theirs, epoch = await open_stream(stub, "two")
    await theirs.write(plan(epoch, 1))
    assert (await read(theirs)).epoch > 1
    theirs.cancel()


async def test_a_takeover_ends_the_holders_stream(stub, fake_runner) -> None:
    """The old stream ends at once, and its queued plans are not run."""
    old, _ = await open_stream(stub, "old")
    await old.write(plan(1, 1))
    await read(old)
    fake_runner.gate.clear()
    await old.write(plan(1, 2))
    await old.write(plan(1, 3))
    await asyncio.sleep(0.1)
    new, epoch = await open_stream(stub, "new", takes_over=True)
    await new.write(plan(epoch, 1))
    assert await status(old) == (grpc.StatusCode.ABORTED, "scheduler new took over")
    fake_runner.gate.set()
    assert (await read(new)).epoch == epoch == 2
    assert fake_runner.executed[-1] == (2, 1)
    new.cancel()


async def test_a_scheduler_replaces_its_own_stream(stub, fake_runner) -> None:
    """It may know that a connection is dead before the executor does."""
    old, _ = await open_stream(stub, "one")
    new, epoch = await open_stream(stub, "one")
    assert (await status(old))[0] is grpc.StatusCode.ABORTED
    await new.write(plan(epoch, 1))
    assert (await read(new)).epoch == 2
    new.cancel()


async def test_schedulers_without_an_instance_are_different(stub) -> None:
    call, _ = await open_stream(stub, "")
    assert (await refusal(stub, opening("")))[0] is grpc.StatusCode.FAILED_PRECONDITION
    call.cancel()


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (plan(1, 1), "does not begin with an opening"),
        (pb.RunRequest(), "does not begin with an opening"),
        (opening(protocol_version=1), f"speaks version 1 of the plan stream, this executor version {PROTOCOL_VERSION}"),
        (opening(protocol_version=9), f"speaks version 9 of the plan stream, this executor version {PROTOCOL_VERSION}"),
        (opening(protocol_version=9, least_protocol_version=8), "speaks versions 8 to 9 of the plan stream, this"),
        (opening(features=[*FEATURES, "time travel"]), "lacks features that the scheduler needs: time travel"),
    ],
)
async def test_a_scheduler_of_another_protocol_is_refused(message, complaint, stub, fake_runner) -> None:
    code, details = await refusal(stub, message)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert complaint in details
    assert not fake_runner.executed
    call, epoch = await open_stream(stub)
    assert epoch == 1, "a refusal uses up no epoch"
    call.cancel()


async def test_a_newer_scheduler_that_speaks_this_version_gets_the_lease(stub) -> None:
    call = stub.Run()
    await call.write(opening(protocol_version=PROTOCOL_VERSION + 3, least_protocol_version=PROTOCOL_VERSION))
    assert (await call.read()).lease.epoch == 1
    call.cancel()


async def test_a_scheduler_from_before_leases_is_refused(channel, fake_runner) -> None:
    """It sends a plan where the executor expects the opening: with an epoch of its choice, here the largest one."""
    first = pb.StepPlan(epoch=2**64 - 1, step_id=1, retired_slots=b"", row_counts=b"\0" * 8).SerializeToString()
    run = channel.stream_stream("/quire.executor.v1.Executor/Run")
    call = run()
    await call.write(first)
    code, details = await status(call)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"this executor version {PROTOCOL_VERSION}: run the same release of both" in details
    assert not fake_runner.executed


async def test_names_of_schedulers_are_safe_to_show(stub) -> None:
    call, _ = await open_stream(stub, holder="a\nb" + 10_000 * "c")
    _, details = await refusal(stub, opening("two"))
    assert "a?bccc" in details
    assert len(details) < 500
    call.cancel()


async def test_streams_without_a_lease_are_few_and_short(stub, monkeypatch) -> None:
    monkeypatch.setattr(servicer, "_OPENING_TIMEOUT_S", 1.0)
    silent = [stub.Run() for _ in range(servicer._MAX_OPENINGS)]
    await asyncio.gather(*(call.wait_for_connection() for call in silent))
    await asyncio.sleep(0.2)
    assert await refusal(stub) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams wait for a lease")
    for call in silent:
        assert await status(call) == (grpc.StatusCode.DEADLINE_EXCEEDED, "no opening within 1 s")
    call, _ = await open_stream(stub)
    call.cancel()
