"""Leases that begin with the blocks of an earlier one, over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from executor.plans.plan import Publication
from executor.stream import servicer
from quire.plan_stream import DIGEST_BYTES, FEATURES, OPTIONAL_FEATURES
from scheduler.core import ResultMismatch
from scheduler.engine import plan_wire
from tests.support.executor.messages import read
from tests.support.executor.plan_driver import ints
from tests.support.executor.served import open_stream, opening, plan, status

SCHEME = "a scheme"
DIGESTS = bytes(range(2 * DIGEST_BYTES))
RETAINED = Publication(ints(3, 1), DIGESTS)
ALL_FEATURES = FEATURES + OPTIONAL_FEATURES


async def lease_of(call) -> tuple[list[int], bytes]:
    answer = await asyncio.wait_for(call.read(), 10)
    return plan_wire.unpack(answer.lease.retained_blocks), answer.lease.retained_digests


async def opened(stub, **fields):
    call = stub.Run()
    await call.write(opening(features=ALL_FEATURES, **fields))
    return call


async def test_a_lease_names_the_retained_blocks_in_order(stub, fake_runner) -> None:
    fake_runner.retained = RETAINED
    call = await opened(stub, digest_scheme=SCHEME)
    assert await lease_of(call) == ([3, 1], DIGESTS)
    assert fake_runner.num_resets == 1
    await call.write(plan(1, 1))
    assert (await read(call)).step_id == 1
    assert fake_runner.num_resets == 1, "the first plan must not empty the slots again"
    call.cancel()


async def test_a_lease_without_a_scheme_names_no_blocks(stub, fake_runner) -> None:
    fake_runner.retained = RETAINED
    call = await opened(stub)
    assert await lease_of(call) == ([], b"")
    call.cancel()


async def taken_over_during_a_step(stub, fake_runner, instance: str):
    """Returns the stream of a scheduler that took over while a plan of the one before is computed, until the gate
    opens."""
    old, epoch = await open_stream(stub, "old")
    fake_runner.gate.clear()
    await old.write(plan(epoch, 1))
    await asyncio.to_thread(fake_runner.entered.wait, 10)
    new = await opened(stub, instance=instance, takes_over=True, digest_scheme=SCHEME)
    assert (await status(old))[0] is grpc.StatusCode.ABORTED
    return new


async def test_a_lease_with_retained_blocks_waits_for_the_plans_of_the_one_before(stub, fake_runner) -> None:
    new = await taken_over_during_a_step(stub, fake_runner, "new")
    reading = asyncio.create_task(lease_of(new))
    await asyncio.sleep(0.2)
    assert not reading.done()
    fake_runner.gate.set()
    await reading
    assert fake_runner.executed == [(1, 1)]
    new.cancel()


async def test_a_stream_that_is_taken_over_before_its_lease_ends(stub, fake_runner) -> None:
    second = await taken_over_during_a_step(stub, fake_runner, "second")
    third = await opened(stub, instance="third", takes_over=True, digest_scheme=SCHEME)
    assert await status(second) == (grpc.StatusCode.ABORTED, "scheduler third took over")
    fake_runner.gate.set()
    await lease_of(third)
    third.cancel()


@pytest.mark.parametrize("is_broken", [True, False])
async def test_only_a_failed_step_makes_the_pool_untrusted_and_only_once(stub, fake_runner, is_broken) -> None:
    call = await opened(stub, digest_scheme=SCHEME)
    await lease_of(call)
    if is_broken:
        fake_runner.errors[1] = RuntimeError("a kernel failed")
        await call.write(plan(1, 1))
    else:
        await call.write(plan(1, 1, retired_slots=b"\xff\x00\x00\x00"))
    expected = grpc.StatusCode.INTERNAL if is_broken else grpc.StatusCode.INVALID_ARGUMENT
    assert (await status(call))[0] is expected
    for _ in range(2):
        call = await opened(stub, digest_scheme=SCHEME)
        await lease_of(call)
    assert fake_runner.trusted == [True, not is_broken, True]
    call.cancel()


async def test_the_name_of_a_scheme_is_bounded(stub) -> None:
    call = await opened(stub, digest_scheme="x" * (servicer._MAX_SCHEME + 1))
    assert await status(call) == (grpc.StatusCode.INVALID_ARGUMENT, "the name of the digest scheme is too long")


@pytest.mark.parametrize(
    ("blocks", "digests"),
    [
        ((1, 2), DIGESTS[:-1]),
        ((1, 2), b""),
        ((), DIGESTS),
        ((1, 1), DIGESTS),
        ((0, 1), DIGESTS),
        ((1, 9), DIGESTS),
        ((1, -1), DIGESTS),
    ],
)
def test_a_scheduler_refuses_a_lease_with_wrong_blocks(blocks: tuple[int, ...], digests: bytes) -> None:
    lease = servicer.plan_wire.lease_to_message(1, "", Publication(ints(*blocks), digests))
    with pytest.raises(ResultMismatch, match="not distinct blocks of a pool of 9"):
        plan_wire.decode_retained(lease, 9)
    lease = servicer.plan_wire.lease_to_message(1, "", RETAINED)
    assert plan_wire.decode_retained(lease, 9) == [(3, DIGESTS[:DIGEST_BYTES]), (1, DIGESTS[DIGEST_BYTES:])]
