"""Tests that check_invariants finds and names each invariant that is broken.

Each test changes one entry of the state of a scheduler that has waiting and running requests.
"""

from collections.abc import Callable

import pytest

from scheduler.core import (
    BeamParams,
    InvariantViolation,
    Scheduler,
    SchedulerLimits,
    Sequence,
    State,
    check_invariants,
)
from scheduler.core.baselines.batching import ClosedBatch
from scheduler.core.baselines.contiguous import ContiguousKVCache
from scheduler.core.inspect.views import deferred_releases, unfinished_sequences
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request


@pytest.fixture
def harness() -> Harness:
    """Returns a harness with blocks of two tokens.

    Request 1 has ended and left cached blocks; 2 has two samples that share blocks; 3 holds a reservation; 5 has two
    beams; 4 waits.
    """
    limits = SchedulerLimits(5, 32, 20, max_preemptions=0, watermark_ratio=0)
    harness = Harness(limits, num_blocks=50, block_size=2, vocab_size=VOCAB_SIZE)
    harness.attach()
    harness.add(make_request(1, "wxyz", 2))
    harness.run()
    harness.add(make_request(2, "abcde", 9, seeds=range(2)))
    harness.add(make_request(3, "mnop", 9))
    harness.add(make_request(5, "rst", 9, beam=BeamParams(2, 2)))
    harness.add(make_request(4, "q", 9))
    harness.schedule()
    harness.commit()
    harness.schedule()
    return harness


def sample(scheduler: Scheduler, request_id: int = 2) -> Sequence:
    return next(s for s in unfinished_sequences(scheduler.state) if s.request.request_id == request_id)


def free_a_block_in_use(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool._free[sample(scheduler).block_table[0]] = None


def lose_a_free_block(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool._free.popitem()


def give_out_the_null_block(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool.ref_counts[0] = 1


def count_one_reference_too_many(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool.ref_counts[sample(scheduler).block_table[0]] += 1


def forget_a_reference(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool.ref_counts[sample(scheduler).block_table[0]] -= 1


def drop_a_deferred_release(scheduler: Scheduler) -> None:
    scheduler.stop(2, 0)
    next(deferred_releases(scheduler.state)).pop()


def write_to_a_shared_block(scheduler: Scheduler) -> None:
    sequence = sample(scheduler, 3)
    scheduler.state.cache.pool.retain(sequence.block_table[-1])
    sample(scheduler).block_table.append(sequence.block_table[-1])


def write_to_a_published_block(scheduler: Scheduler) -> None:
    scheduler.state.cache.index.publish(sample(scheduler, 3).block_table[-1], b"digest of something else")


def publish_two_blocks_as_one(scheduler: Scheduler) -> None:
    index = scheduler.state.cache.index
    (first, _), (_, second) = index.items()[:2]
    index._block_by_digest[first] = second


def forget_half_of_an_entry(scheduler: Scheduler) -> None:
    index = scheduler.state.cache.index
    index._digest_by_block.pop(index.items()[0][1])


def publish_blocks_that_are_not_computed(scheduler: Scheduler) -> None:
    for sequence in scheduler.state.batch.running:
        sequence.num_computed_tokens = 0


def publish_other_tokens(scheduler: Scheduler) -> None:
    sample(scheduler, 3).token_ids[0] += 1


def lose_a_waiting_sequence(scheduler: Scheduler) -> None:
    scheduler.state.waiting.remove(sample(scheduler, 4))


def wait_and_run(scheduler: Scheduler) -> None:
    scheduler.state.waiting.add(sample(scheduler))


def run_in_another_state(scheduler: Scheduler) -> None:
    sample(scheduler).state = State.PREEMPTED


def wait_in_another_state(scheduler: Scheduler) -> None:
    sample(scheduler, 4).state = State.RUNNING


def wait_with_a_slot(scheduler: Scheduler) -> None:
    sample(scheduler, 4).slot = 2


def compute_more_than_was_planned(scheduler: Scheduler) -> None:
    sample(scheduler).num_computed_tokens = 100


def plan_more_than_is_known(scheduler: Scheduler) -> None:
    del sample(scheduler).token_ids[-2:]


def hold_one_block_too_many(scheduler: Scheduler) -> None:
    sample(scheduler).block_table.append(scheduler.state.cache.pool.take())


def share_a_slot(scheduler: Scheduler) -> None:
    sample(scheduler).slot = sample(scheduler, 3).slot


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.state.batch.return_slot(7)


def reserve_more_blocks_than_are_free(scheduler: Scheduler) -> None:
    scheduler.state.cache.reserve(sample(scheduler), 1000)


def forget_a_reservation(scheduler: Scheduler) -> None:
    scheduler.state.cache.num_reserved_blocks -= 1


def lose_a_slot_of_a_group(scheduler: Scheduler) -> None:
    scheduler.state.requests[5].child_slots.append(3)


def plan_a_beam_that_is_decided(scheduler: Scheduler) -> None:
    group = scheduler.state.requests[5].group
    assert group is not None
    group.branches = [(group.beams[0], 7)]


def run_beside_a_closed_batch(scheduler: Scheduler) -> None:
    """Makes the batch a closed one without members."""
    scheduler.state.admission_queue = ClosedBatch(0.0, scheduler.state)


def split_a_run(scheduler: Scheduler) -> None:
    """Makes the cache a contiguous one, with runs as long as this table."""
    sequence, cache = sample(scheduler, 3), scheduler.state.cache
    num_token_slots = len(sequence.block_table) * cache.block_size
    cache.__class__ = ContiguousKVCache
    cache._num_reserved_tokens, cache._max_model_len = lambda request, max_model_len: num_token_slots, 0
    sequence.block_table.reverse()


BREAKS: list[tuple[str, Callable[[Scheduler], None]]] = [
    ("I1", free_a_block_in_use),
    ("I1", lose_a_free_block),
    ("I1", give_out_the_null_block),
    ("I2", count_one_reference_too_many),
    ("I2", forget_a_reference),
    ("I2", drop_a_deferred_release),
    ("I3", write_to_a_shared_block),
    ("I3", write_to_a_published_block),
    ("I4", publish_two_blocks_as_one),
    ("I4", forget_half_of_an_entry),
    ("I5", publish_blocks_that_are_not_computed),
    ("I5", publish_other_tokens),
    ("I7", lose_a_waiting_sequence),
    ("I7", wait_and_run),
    ("I7", run_in_another_state),
    ("I7", wait_in_another_state),
    ("I7", wait_with_a_slot),
    ("I8", compute_more_than_was_planned),
    ("I8", plan_more_than_is_known),
    ("I8", hold_one_block_too_many),
    ("I9", share_a_slot),
    ("I9", lose_a_slot),
    ("I9", lose_a_slot_of_a_group),
    ("I19", plan_a_beam_that_is_decided),
    ("I10", reserve_more_blocks_than_are_free),
    ("I10", forget_a_reservation),
    ("I20", run_beside_a_closed_batch),
    ("I21", split_a_run),
]


@pytest.mark.parametrize(("number", "break_it"), BREAKS, ids=[f"{n}-{f.__name__}" for n, f in BREAKS])
def test_each_broken_invariant_is_named(harness: Harness, number: str, break_it: Callable[[Scheduler], None]) -> None:
    check_invariants(harness.scheduler)
    break_it(harness.scheduler)
    with pytest.raises(InvariantViolation, match=rf"\b{number}:"):
        check_invariants(harness.scheduler)


def test_the_harness_finds_a_block_freed_too_early(harness: Harness) -> None:
    """The harness checks I6, because it knows what each plan touches."""
    sequence = sample(harness.scheduler)
    harness.scheduler.state._release_after_flight = harness.scheduler.state.cache.release  # type: ignore[method-assign]
    harness.scheduler.cancel(sequence.request.request_id)
    check_invariants(harness.scheduler)
    with pytest.raises(InvariantViolation, match="I6: plan"):
        harness.check()
