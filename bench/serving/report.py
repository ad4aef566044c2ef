"""The table and the JSON of a serving measurement."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from bench.machine import describe_machine, local_device
from bench.report import Percentiles, RunSummary
from bench.serving.measurer import Run, ratios, ratios_by_round
from bench.trace import describe, make_trace
from quire.block_map import ServerInfo


def render_table(runs: Sequence[Run]) -> Table:
    """Returns a table with a row for each number of clients and engine, with medians over the rounds.

    `ratio` is Quire's tokens/s over the row's, with the range over the rounds if there are several. Without ranges the
    table fits 80 columns: the 90th percentiles are in the JSON only.
    """
    multiples = ratios_by_round(runs)
    table = Table(title="closed loop; latencies in ms, p50/p99", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("c", justify="left" if any(run.turn.profile for run in runs) else "right", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for heading in ("tokens/s", "req/s", "TTFT", "TPOT", "ITL", "waste", "preempt", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (label, engine), own in _by_row(runs).items():
        pools = [summary.pool for summary in own if summary.pool is not None]
        table.add_row(
            str(label),
            engine,
            f"{median(summary.output_tokens_per_s for summary in own):.1f}",
            f"{median(summary.requests_per_s for summary in own):.2f}",
            _pair(summary.ttft_ms for summary in own),
            _pair(summary.tpot_ms for summary in own),
            _pair(summary.itl_ms for summary in own),
            f"{median(pool.mean_waste_ratio for pool in pools):.1%}" if pools else "",
            f"{median(pool.num_preemptions for pool in pools):.0f}" if pools else "",
            _ratio(multiples.get(engine, {}).get(label, [])),
        )
    return table


def describe_run(run: Run) -> str:
    """Returns one line about a finished run."""
    summary, idle = run.summary, run.summary.executor_idle_ratio
    load = f"{run.turn.profile} c={summary.concurrency}".lstrip()
    line = f"{summary.engine} {load}: {summary.output_tokens_per_s:.1f} output tokens/s"
    return line if idle is None else f"{line}, executor idle {idle:.1%}"


def report(runs: Sequence[Run], info: ServerInfo) -> dict[str, Any]:
    """Returns the whole measurement as JSON values.

    runs    a summary of each run, with its round
    ratios  medians by number of clients, where exactly one other engine took part
    """
    medians = ratios(runs)
    turns = list(dict.fromkeys(run.turn for run in runs))
    return {
        "traces": [
            {"concurrency": turn.concurrency, "round": turn.round_index, "profile": turn.profile}
            | describe(turn.trace, make_trace(turn.trace))
            for turn in turns
        ],
        "server": asdict(info),
        "machine": describe_machine(local_device()),
        "runs": [asdict(run.summary) | {"round": run.turn.round_index, "profile": run.turn.profile} for run in runs],
        "quire_tokens_per_s_ratio_to": medians,
        "ratios": next(iter(medians.values())) if len(medians) == 1 else {},
    }


def _by_row(runs: Sequence[Run]) -> dict[tuple[int | str, str], list[RunSummary]]:
    """Groups the summaries of all rounds by label and engine, in the order of profiles or of concurrency."""
    found: dict[tuple[int | str, str], list[RunSummary]] = {}
    for run in sorted(runs, key=lambda run: 0 if run.turn.profile else run.turn.concurrency):
        found.setdefault((run.turn.label, run.summary.engine), []).append(run.summary)
    return found


def _pair(percentiles: Iterable[Percentiles | None]) -> str:
    known = [values for values in percentiles if values is not None]
    if not known:
        return "-"
    return f"{_three_digits(median(v.p50 for v in known))}/{_three_digits(median(v.p99 for v in known))}"


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(rounds: Sequence[float]) -> str:
    if len(rounds) < 2:
        return f"{rounds[0]:.2f}" if rounds else ""
    return f"{median(rounds):.2f} ({min(rounds):.2f}-{max(rounds):.2f})"
