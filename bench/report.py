"""From records to numbers: percentiles, a table for people, JSON for machines."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.load import LoadResult
from bench.pool_sampler import PoolStats
from bench.step_traces import idle_ratio
from quire.block_map import StepTrace


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In milliseconds, linear between ranks; None where there was nothing to measure."""

    p50: float
    p90: float
    p99: float


def percentiles_ms(values_s: Iterable[float]) -> Percentiles | None:
    values = np.fromiter(values_s, dtype=np.float64)
    if values.size == 0:
        return None
    p50, p90, p99 = np.percentile(values * 1e3, (50, 90, 99))
    return Percentiles(float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One engine under one concurrency.

    engine  "quire", "peer" or "transformers"
    pool    what Quire's block pool did; None for others
    executor_idle_ratio  share of the run in which Quire's executor had no plan to work on; None for others
    """

    engine: str
    concurrency: int
    num_requests: int
    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
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
    records = result.records
    num_output_tokens = sum(record.num_output_tokens for record in records)
    return RunSummary(
        engine=engine,
        concurrency=result.concurrency,
        num_requests=len(records),
        wall_s=result.wall_s,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        num_cached_tokens=sum(record.num_cached_tokens for record in records),
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


def ratios(runs: Sequence[RunSummary]) -> dict[str, dict[int, float]]:
    """Other engine → concurrency → Quire's output tokens/s divided by its, where both ran."""
    rates = {(run.engine, run.concurrency): run.output_tokens_per_s for run in runs}
    found: dict[str, dict[int, float]] = {}
    for (engine, concurrency), rate in rates.items():
        if engine != "quire" and ("quire", concurrency) in rates:
            found.setdefault(engine, {})[concurrency] = rates["quire", concurrency] / rate
    return found


def render_table(runs: Sequence[RunSummary]) -> Table:
    """One row a run, those of one concurrency together; `ratio` is Quire's tokens/s to that row's.

    Narrow enough for 80 columns: the 90th percentiles are in the JSON only.
    """
    multiples = ratios(runs)
    table = Table(title="closed loop; latencies in ms, p50/p99", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("c", justify="right", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for heading in ("tokens/s", "req/s", "TTFT", "TPOT", "ITL", "waste", "preempt", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in sorted(runs, key=lambda run: run.concurrency):
        multiple = multiples.get(run.engine, {}).get(run.concurrency)
        table.add_row(
            str(run.concurrency),
            run.engine,
            f"{run.output_tokens_per_s:.1f}",
            f"{run.requests_per_s:.2f}",
            _pair(run.ttft_ms),
            _pair(run.tpot_ms),
            _pair(run.itl_ms),
            f"{run.pool.mean_waste_ratio:.1%}" if run.pool else "",
            str(run.pool.num_preemptions) if run.pool else "",
            f"{multiple:.2f}" if multiple else "",
        )
    return table


def _pair(values: Percentiles | None) -> str:
    return f"{_three_digits(values.p50)}/{_three_digits(values.p99)}" if values else "-"


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def report(runs: Sequence[RunSummary], server: dict[str, object], traces: list[dict[str, object]]) -> dict[str, Any]:
    """All of a measurement as JSON values; `server` and `traces` say what was measured with what."""
    return {
        "traces": traces,
        "server": server,
        "machine": {
            "num_cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.system(),
            "python": platform.python_version(),
        },
        "runs": [asdict(run) for run in runs],
        "quire_tokens_per_s_ratio_to": ratios(runs),
    }


def save(path: Path, values: dict[str, Any]) -> None:
    """Writes JSON, making the folder where it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
