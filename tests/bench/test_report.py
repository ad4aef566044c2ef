"""Summaries of runs and statistics of the block pool."""

import random

import numpy as np
import pytest

from bench.load import LoadResult, RequestRecord
from bench.pool_sampler import PoolStats, pool_stats
from bench.report import percentiles_ms, summarize
from quire.block_map import PoolSummary

POOL = PoolStats(3, 0.125, 0.5, 7, 1, 4, 2, num_preemptions=9, num_cow_copies=1)


def result(concurrency: int, wall_s: float, *records: RequestRecord) -> LoadResult:
    return LoadResult(concurrency, wall_s, records)


FAST = RequestRecord(0.0, (0.010, 0.020, 0.040), 5, 3, num_cached_tokens=2)
SLOW = RequestRecord(1.0, (1.030, 1.060), 7, 4, num_cached_tokens=0)
SHORT = RequestRecord(2.0, (2.050,), 1, 1, num_cached_tokens=0)


@pytest.mark.parametrize("count", [1, 2, 5, 101])
def test_percentiles_equal_numpys(count: int) -> None:
    rng = random.Random(count)
    values_s = [rng.expovariate(10.0) for _ in range(count)]
    found = percentiles_ms(iter(values_s))
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx(np.percentile(np.array(values_s) * 1000, (50, 90, 99)))


def test_percentiles_interpolate_between_ranks() -> None:
    found = percentiles_ms([0.004, 0.001, 0.002, 0.003])
    assert found is not None
    assert found.p50 == pytest.approx(2.5)
    assert found.p90 == pytest.approx(3.7)
    assert percentiles_ms([]) is None


def test_summary_counts_tokens_not_messages() -> None:
    run = summarize("quire", result(2, 4.0, FAST, SLOW, SHORT), POOL)
    assert (run.num_requests, run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens) == (
        3,
        13,
        8,
        2,
    )
    assert run.output_tokens_per_s == 2.0
    assert run.requests_per_s == 0.75
    assert run.ttft_ms is not None
    assert run.ttft_ms.p50 == pytest.approx(30.0)
    assert run.tpot_ms is not None  # 15 ms and 10 ms; the request of one token has none
    assert run.tpot_ms.p50 == pytest.approx(12.5)
    assert run.itl_ms is not None  # 10, 20 and 30 ms
    assert run.itl_ms.p50 == pytest.approx(20.0)
    assert run.latency_ms is not None
    assert run.latency_ms.p50 == pytest.approx(50.0)


def test_cached_tokens_that_an_engine_does_not_report_are_not_zero() -> None:
    run = summarize("peer", result(1, 1.0, RequestRecord(0.0, (0.1,), 5, 1), FAST))
    assert run.num_cached_tokens is None


def test_pool_stats_weigh_waste_by_allocation_and_count_differences() -> None:
    def sample(used: int, wasted: int, running: int, waiting: int, preemptions: int) -> PoolSummary:
        num_active = (used + wasted) // 4
        return PoolSummary(9, 0, num_active, 0, used, wasted, running, waiting, preemptions, 2 * preemptions)

    stats = pool_stats([sample(0, 0, 0, 0, 5), sample(12, 4, 2, 3, 6), sample(2, 6, 1, 1, 8)])
    assert stats.mean_waste_ratio == pytest.approx((4 + 6) / (16 + 8))
    assert stats.max_waste_ratio == pytest.approx(6 / 8)
    assert (stats.max_active_blocks, stats.max_running, stats.max_waiting) == (4, 2, 3)
    assert (stats.num_preemptions, stats.num_cow_copies) == (3, 6)
    assert stats.num_samples == 3
