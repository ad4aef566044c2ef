"""check_invariants sees what it says it sees: each invariant is broken on purpose, and named.

The books are broken from outside, one entry at a time, in a scheduler in the middle of its work.
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
from tests.support.core.letters import VOCAB_SIZE, make_request
from tests.support.core.rig import Rig


@pytest.fixture
def rig() -> Rig:
    """Blocks of two tokens. Request 1 is gone and left cached blocks; 2 has two samples that share; 3 holds a
    reservation; 5 has two beams; 4 waits."""
    limits = SchedulerLimits(5, 32, 20, max_preemptions=0, watermark_ratio=0)
    rig = Rig(limits, num_blocks=50, block_size=2, vocab_size=VOCAB_SIZE)
    rig.attach()
    rig.add(make_request(1, "wxyz", 2))
    rig.run()
    rig.add(make_request(2, "abcde", 9, seeds=range(2)))
    rig.add(make_request(3, "mnop", 9))
    rig.add(make_request(5, "rst", 9, beam=BeamParams(2, 2)))
    rig.add(make_request(4, "q", 9))
    rig.schedule()
    rig.commit()
    rig.schedule()
    return rig


def sample(scheduler: Scheduler, request_id: int = 2) -> Sequence:
    return next(s for s in unfinished_sequences(scheduler.state) if s.request.request_id == request_id)


def free_a_block_in_use(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool._free[sample(scheduler).block_table[0]] = None


def lose_a_free_block(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool._free.popitem()


def give_out_the_null_block(scheduler: Scheduler) -> None:
    scheduler.state.cache.pool.ref_counts[0] = 1


def count_a_reference_too_many(scheduler: Scheduler) -> None:
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


def publish_what_is_not_computed(scheduler: Scheduler) -> None:
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


def hold_a_block_too_many(scheduler: Scheduler) -> None:
    sample(scheduler).block_table.append(scheduler.state.cache.pool.take())


def sit_on_another_lap(scheduler: Scheduler) -> None:
    sample(scheduler).slot = sample(scheduler, 3).slot


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.state.batch.return_slot(7)


def promise_more_than_there_is(scheduler: Scheduler) -> None:
    scheduler.state.cache.reserve(sample(scheduler), 1000)


def forget_a_promise(scheduler: Scheduler) -> None:
    scheduler.state.cache.num_reserved_blocks -= 1


def lose_a_slot_of_a_group(scheduler: Scheduler) -> None:
    scheduler.state.requests[5].child_slots.append(3)


def plan_a_beam_that_is_decided(scheduler: Scheduler) -> None:
    group = scheduler.state.requests[5].group
    assert group is not None
    group.branches = [(group.beams[0], 7)]


def run_beside_a_closed_batch(scheduler: Scheduler) -> None:
    """Makes the batch a closed one without members."""
    scheduler.state.admission_queue = ClosedBatch(scheduler.state, 0.0)


def lie_in_pieces(scheduler: Scheduler) -> None:
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
    ("I2", count_a_reference_too_many),
    ("I2", forget_a_reference),
    ("I2", drop_a_deferred_release),
    ("I3", write_to_a_shared_block),
    ("I3", write_to_a_published_block),
    ("I4", publish_two_blocks_as_one),
    ("I4", forget_half_of_an_entry),
    ("I5", publish_what_is_not_computed),
    ("I5", publish_other_tokens),
    ("I7", lose_a_waiting_sequence),
    ("I7", wait_and_run),
    ("I7", run_in_another_state),
    ("I7", wait_in_another_state),
    ("I7", wait_with_a_slot),
    ("I8", compute_more_than_was_planned),
    ("I8", plan_more_than_is_known),
    ("I8", hold_a_block_too_many),
    ("I9", sit_on_another_lap),
    ("I9", lose_a_slot),
    ("I9", lose_a_slot_of_a_group),
    ("I19", plan_a_beam_that_is_decided),
    ("I10", promise_more_than_there_is),
    ("I10", forget_a_promise),
    ("I20", run_beside_a_closed_batch),
    ("I21", lie_in_pieces),
]


@pytest.mark.parametrize(("number", "break_it"), BREAKS, ids=[f"{n}-{f.__name__}" for n, f in BREAKS])
def test_a_broken_invariant_is_named(rig: Rig, number: str, break_it: Callable[[Scheduler], None]) -> None:
    check_invariants(rig.scheduler)
    break_it(rig.scheduler)
    with pytest.raises(InvariantViolation, match=rf"\b{number}:"):
        check_invariants(rig.scheduler)


def test_the_rig_sees_a_block_freed_too_early(rig: Rig) -> None:
    """I6 is about the executor, too; so the rig checks it, which knows what each plan touches."""
    sequence = sample(rig.scheduler)
    rig.scheduler.state._release_after_flight = rig.scheduler.state.cache.release  # type: ignore[method-assign]
    rig.scheduler.cancel(sequence.request.request_id)
    check_invariants(rig.scheduler)
    with pytest.raises(InvariantViolation, match="I6: plan"):
        rig.check()
