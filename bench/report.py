"""Summaries of runs: percentiles, rates, and the JSON file that a measurement writes."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import LoadResult
from bench.pool_sampler import PoolStats
from bench.step_traces import idle_ratio
from quire.block_map import StepTrace


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in milliseconds, interpolated between ranks."""

    p50: float
    p90: float
    p99: float


def percentiles_ms(values_s: Iterable[float]) -> Percentiles | None:
    """Returns percentiles in milliseconds, or None if there are no values."""
    values = np.fromiter(values_s, dtype=np.float64)
    if values.size == 0:
        return None
    p50, p90, p99 = np.percentile(values * 1e3, (50, 90, 99))
    return Percentiles(float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of an engine.

    engine  "quire", "peer", "transformers", "static" or "continuous"
    num_cached_tokens  prompt tokens that the engine found in its cache; None: it does not say
    pool    statistics of Quire's block pool; None for other engines
    executor_idle_ratio  share of the run in which Quire's executor had no plan; None for other engines
    """

    engine: str
    concurrency: int
    num_requests: int
    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    latency_ms: Percentiles | None
    pool: PoolStats | None = None
    executor_idle_ratio: float | None = None


def summarize(
    engine: str, result: LoadResult, pool: PoolStats | None = None, steps: Sequence[StepTrace] = ()
) -> RunSummary:
    """Returns the figures of one run."""
    records = result.records
    num_output_tokens = sum(record.num_output_tokens for record in records)
    return RunSummary(
        engine=engine,
        concurrency=result.concurrency,
        num_requests=len(records),
        wall_s=result.wall_s,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        num_cached_tokens=result.num_cached_tokens,
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=num_output_tokens / result.wall_s,
        requests_per_s=len(records) / result.wall_s,
        ttft_ms=percentiles_ms(record.ttft_s for record in records),
        tpot_ms=percentiles_ms(tpot for record in records if (tpot := record.tpot_s) is not None),
        itl_ms=percentiles_ms(pause for record in records for pause in record.itl_s),
        latency_ms=percentiles_ms(record.latency_s for record in records),
        pool=pool,
        executor_idle_ratio=idle_ratio(steps),
    )


def save(path: Path, values: dict[str, Any] | list[Any]) -> None:
    """Writes a JSON file at once: a process that is killed leaves the previous content. Creates missing folders.

    Raises OSError.
    """
    text = json.dumps(values, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
