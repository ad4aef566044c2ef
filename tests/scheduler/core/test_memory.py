"""KVAllocation modes: what a request reserves, where it is placed, and what is refused."""

import pytest

from scheduler.core import (
    CONTIGUOUS,
    CONTIGUOUS_EXACT,
    KV_ALLOCATIONS,
    PAGED,
    BeamParams,
    CapacityExceeded,
    FinishReason,
    InvariantViolation,
    KVAllocation,
    SchedulerLimits,
    kv_usage,
)
from scheduler.core.baselines.contiguous import ReservedTokens, RunPool, exact, longest, power_of_two
from tests.support.core.letters import VOCAB_SIZE, make_request
from tests.support.core.rig import Rig

CONTIGUOUS_MODES = [mode for mode in KV_ALLOCATIONS.values() if mode is not PAGED]


def build_rig(memory: KVAllocation, *, num_usable_blocks: int = 12, max_preemptions: int = 3) -> Rig:
    limits = SchedulerLimits(8, 64, 16, max_in_flight=1, max_preemptions=max_preemptions)
    rig = Rig(limits, num_blocks=num_usable_blocks + 1, block_size=4, vocab_size=VOCAB_SIZE, kv_allocation=memory)
    rig.attach()
    return rig


# --- what is reserved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserved_tokens", "num_token_slots"),
    [(longest, 2048), (power_of_two, 10 + 32), (exact, 10 + 25 - 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_reserves_as_in_the_example_of_the_paper(reserved_tokens: ReservedTokens, num_token_slots: int) -> None:
    """Kwon et al., section 6.1: an output of 25 tokens; Orca (Pow2) reserves 32 positions for it."""
    assert reserved_tokens(make_request(1, "abcdefghij", 25), 2048) == num_token_slots


@pytest.mark.parametrize("num_output", range(1, 70))
def test_a_power_of_two_is_enough_and_at_most_twice_as_much(num_output: int) -> None:
    num_reserved = power_of_two(make_request(1, "a", num_output), 2048) - 1
    assert num_output <= num_reserved < 2 * num_output
    assert num_reserved.bit_count() == 1


def test_nobody_reserves_more_than_a_model_can_take() -> None:
    assert power_of_two(make_request(1, "abcdefgh", 5), 14) == 14


# --- where it is placed -----------------------------------------------------------------------------------------


def test_first_fit() -> None:
    pool = RunPool(1 + 10)
    runs = [pool.take_run(length) for length in (2, 3, 1, 4)]
    assert runs == [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    for block in (*runs[0], *runs[1], *runs[3]):
        pool.release(block, findable=False)
    assert list(pool.free_runs()) == [5, 4]
    assert pool.find_run(4) == 1, "the first that is long enough, not the best"
    assert pool.take_run(4) == [1, 2, 3, 4]
    assert list(pool.free_runs()) == [1, 4]
    assert pool.find_run(5) is None
    assert pool.take_run(4) == [7, 8, 9, 10]


def test_a_run_that_was_not_found_may_be_there_after_a_release() -> None:
    pool = RunPool(1 + 3)
    first, second, third = pool.take_run(1) + pool.take_run(1) + pool.take_run(1)
    pool.release(first, findable=False)
    pool.release(third, findable=False)
    assert pool.find_run(2) is None
    pool.release(second, findable=False)
    assert pool.find_run(2) == 1


def test_a_run_that_is_not_there_cannot_be_taken() -> None:
    pool = RunPool(1 + 2)
    with pytest.raises(InvariantViolation, match="a run of 3 blocks"):
        pool.take_run(3)


def test_the_head_of_the_queue_waits_for_a_run_though_enough_blocks_are_free() -> None:
    """Ten blocks: 1 has 1 to 3, 2 has 4 to 7, 3 has 8 to 10. When 1 and 3 have ended six are free, and 4 wants four."""
    rig = build_rig(CONTIGUOUS_EXACT, num_usable_blocks=10)
    for request_id, num_prompt, max_tokens in ((1, 12, 1), (2, 4, 12), (3, 12, 1)):
        rig.add(make_request(request_id, "abcdefghijkl"[:num_prompt], max_tokens))
    rig.schedule()
    rig.commit()
    pool = rig.scheduler.state.cache.pool
    assert isinstance(pool, RunPool)
    assert list(pool.free_runs()) == [3, 3]
    rig.add(make_request(4, "mnopqrstuvwx", 4))
    rig.schedule()
    assert rig.scheduler.num_waiting == 1
    assert kv_usage(rig.scheduler).num_external_token_slots == 6 * 4
    rig.run()


# --- what falls out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", CONTIGUOUS_MODES, ids=lambda memory: memory.name)
@pytest.mark.parametrize("max_preemptions", [0, 3])
def test_nobody_is_preempted_and_nobody_takes_a_block_after_admission(
    memory: KVAllocation, max_preemptions: int
) -> None:
    """Sixteen requests that would not fit the pool together, each to its last token."""
    rig = build_rig(memory, max_preemptions=max_preemptions)
    for request_id in range(16):
        rig.add(make_request(request_id, "abcdefgh"[: 1 + request_id % 8], 8))
    tables: dict[int, list[int]] = {}
    while rig.scheduler.num_unfinished_requests:
        rig.schedule()
        for sequence in rig.scheduler.state.batch.running:
            table = tables.setdefault(sequence.request.request_id, list(sequence.block_table))
            assert sequence.block_table == table
        rig.commit()
    assert rig.scheduler.state.counters.num_preemptions == 0
    assert set(rig.clients.ended.values()) == {FinishReason.LENGTH}


def test_no_prefix_is_found_where_runs_are_not_shared() -> None:
    rig = build_rig(CONTIGUOUS)
    for request_id in (1, 2):
        rig.add(make_request(request_id, "abcdefgh"))
        rig.run()
    assert rig.clients.num_cached_tokens == {1: 0, 2: 0}


@pytest.mark.parametrize("memory", CONTIGUOUS_MODES, ids=lambda memory: memory.name)
def test_what_would_share_blocks_is_refused(memory: KVAllocation) -> None:
    rig = build_rig(memory)
    for request in (make_request(1, seeds=range(2)), make_request(2, beam=BeamParams(2, 1))):
        with pytest.raises(CapacityExceeded, match=f"share blocks, which {memory.name} memory cannot"):
            rig.add(request)


def test_a_pool_that_is_shorter_than_a_run_serves_nobody() -> None:
    rig = build_rig(CONTIGUOUS, num_usable_blocks=3)
    with pytest.raises(CapacityExceeded, match="a run of 4 blocks, the pool has 3"):
        rig.add(make_request(1, "a", 1))


def test_a_smaller_pool_fails_those_whose_run_it_cannot_hold() -> None:
    rig = build_rig(CONTIGUOUS)
    rig.add(make_request(1))
    rig.lose()
    rig.attach(num_blocks=1 + 3)
    assert rig.clients.ended == {(1, 0): FinishReason.CAPACITY}
