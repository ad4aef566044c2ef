"""Contiguous KV allocation: the token slots that a request reserves, the run it gets, and the requests refused."""

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
from scheduler.core.baselines.contiguous import ReservedTokens, RunPool, exact, longest, power_of_two, run_length
from scheduler.core.kv_cache import KVCache
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request

CONTIGUOUS_MODES = [mode for mode in KV_ALLOCATIONS.values() if mode is not PAGED]


def build_harness(kv_allocation: KVAllocation, *, num_usable_blocks: int = 12, max_preemptions: int = 3) -> Harness:
    limits = SchedulerLimits(8, 64, 16, max_in_flight=1, max_preemptions=max_preemptions)
    harness = Harness(
        limits, num_blocks=num_usable_blocks + 1, block_size=4, vocab_size=VOCAB_SIZE, kv_allocation=kv_allocation
    )
    harness.attach()
    return harness


# --- reserved tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserved_tokens", "num_token_slots"),
    [(longest, 2048), (power_of_two, 10 + 32), (exact, 10 + 25 - 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_reserves_as_in_the_example_of_the_paper(reserved_tokens: ReservedTokens, num_token_slots: int) -> None:
    """In Kwon et al., section 6.1, Orca (Pow2) reserves 32 positions for an output of 25 tokens."""
    assert reserved_tokens(make_request(1, "abcdefghij", 25), 2048) == num_token_slots


def test_a_paged_cache_has_no_runs() -> None:
    assert run_length(KVCache(10, 4), make_request(1, "abcdefghij", 25)) == 0


@pytest.mark.parametrize("num_output", range(1, 70))
def test_a_power_of_two_holds_the_output_and_less_than_twice_as_much(num_output: int) -> None:
    num_reserved = power_of_two(make_request(1, "a", num_output), 2048) - 1
    assert num_output <= num_reserved < 2 * num_output
    assert num_reserved.bit_count() == 1


def test_no_request_reserves_more_than_max_model_len() -> None:
    assert power_of_two(make_request(1, "abcdefgh", 5), 14) == 14


# --- placement of runs -------------------------------------------------------------------------------------------


def test_takes_the_first_run_that_is_long_enough() -> None:
    pool = RunPool(1 + 10)
    runs = [pool.take_run(length) for length in (2, 3, 1, 4)]
    assert runs == [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    for block in (*runs[0], *runs[1], *runs[3]):
        pool.release(block, findable=False)
    assert list(pool.free_runs()) == [5, 4]
    assert pool.find_run(4) == 1, "the first run that fits, not the best"
    assert pool.take_run(4) == [1, 2, 3, 4]
    assert list(pool.free_runs()) == [1, 4]
    assert pool.find_run(5) is None
    assert pool.take_run(4) == [7, 8, 9, 10]


def test_a_release_can_complete_a_run_that_was_missing() -> None:
    pool = RunPool(1 + 3)
    first, second, third = pool.take_run(1) + pool.take_run(1) + pool.take_run(1)
    pool.release(first, findable=False)
    pool.release(third, findable=False)
    assert pool.find_run(2) is None
    pool.release(second, findable=False)
    assert pool.find_run(2) == 1


def test_taking_a_missing_run_raises() -> None:
    pool = RunPool(1 + 2)
    with pytest.raises(InvariantViolation, match="a run of 3 blocks"):
        pool.take_run(3)


def test_the_head_of_the_queue_waits_for_a_run_even_if_enough_blocks_are_free() -> None:
    """Requests 1, 2, 3 hold blocks 1-3, 4-7, 8-10. When 1 and 3 have ended six are free, but 4 needs a run of four."""
    harness = build_harness(CONTIGUOUS_EXACT, num_usable_blocks=10)
    for request_id, num_prompt, max_tokens in ((1, 12, 1), (2, 4, 12), (3, 12, 1)):
        harness.add(make_request(request_id, "abcdefghijkl"[:num_prompt], max_tokens))
    harness.schedule()
    harness.commit()
    pool = harness.scheduler.state.cache.pool
    assert isinstance(pool, RunPool)
    assert list(pool.free_runs()) == [3, 3]
    harness.add(make_request(4, "mnopqrstuvwx", 4))
    harness.schedule()
    assert harness.scheduler.num_waiting == 1
    assert kv_usage(harness.scheduler).num_external_token_slots == 6 * 4
    harness.run()


# --- whole schedules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_allocation", CONTIGUOUS_MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("max_preemptions", [0, 3])
def test_no_sequence_is_preempted_or_takes_a_block_after_admission(
    kv_allocation: KVAllocation, max_preemptions: int
) -> None:
    """Serves sixteen requests, which do not fit the pool together, to their last tokens."""
    harness = build_harness(kv_allocation, max_preemptions=max_preemptions)
    for request_id in range(16):
        harness.add(make_request(request_id, "abcdefgh"[: 1 + request_id % 8], 8))
    tables: dict[int, list[int]] = {}
    while harness.scheduler.num_unfinished_requests:
        harness.schedule()
        for sequence in harness.scheduler.state.batch.running:
            table = tables.setdefault(sequence.request.request_id, list(sequence.block_table))
            assert sequence.block_table == table
        harness.commit()
    assert harness.scheduler.state.counters.num_preemptions == 0
    assert set(harness.clients.ended.values()) == {FinishReason.LENGTH}


def test_prefixes_are_not_cached() -> None:
    harness = build_harness(CONTIGUOUS)
    for request_id in (1, 2):
        harness.add(make_request(request_id, "abcdefgh"))
        harness.run()
    assert harness.clients.num_cached_tokens == {1: 0, 2: 0}


@pytest.mark.parametrize("kv_allocation", CONTIGUOUS_MODES, ids=lambda mode: mode.name)
def test_requests_that_would_share_blocks_are_refused(kv_allocation: KVAllocation) -> None:
    harness = build_harness(kv_allocation)
    for request in (make_request(1, seeds=range(2)), make_request(2, beam=BeamParams(2, 1))):
        with pytest.raises(CapacityExceeded, match=f"share blocks, which {kv_allocation.name} memory cannot"):
            harness.add(request)


def test_a_request_whose_run_exceeds_the_pool_is_refused() -> None:
    harness = build_harness(CONTIGUOUS, num_usable_blocks=3)
    with pytest.raises(CapacityExceeded, match="a run of 4 blocks, the pool has 3"):
        harness.add(make_request(1, "a", 1))


def test_a_smaller_pool_fails_requests_whose_run_exceeds_it() -> None:
    harness = build_harness(CONTIGUOUS)
    harness.add(make_request(1))
    harness.lose()
    harness.attach(num_blocks=1 + 3)
    assert harness.clients.ended == {(1, 0): FinishReason.CAPACITY}
