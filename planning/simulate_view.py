"""Shows the outcome of a simulation as tables."""

from rich.console import Console
from rich.table import Table

from planning.run import Outcome
from planning.settings import SimulateSettings
from planning.summary import Distribution


def show(outcome: Outcome, settings: SimulateSettings, console: Console) -> None:
    """Prints the summary, and the distributions of times for each tenant."""
    summary, deployment = outcome.summary, outcome.deployment
    where = (
        f"steps measured in {settings.fit}"
        if settings.fit
        else f"{deployment.tensor_parallel} x {deployment.device.name}, roofline"
    )
    facts = Table(title=f"{deployment.model.name} on {where}", show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    for name, value in (
        ("requests", f"{summary.num_requests:,}"),
        ("refused", f"{summary.num_refused:,}"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:,.1f}"),
        ("all tokens/s", f"{summary.total_tokens_per_s:,.1f}"),
        ("executor busy", f"{summary.busy_ratio:.1%}"),
        ("sequences per step, mean and maximum", f"{summary.mean_batch:.1f}, {summary.max_batch}"),
        ("waiting requests, mean and maximum", f"{summary.mean_waiting:.1f}, {summary.max_waiting}"),
        ("pool held by sequences", f"{summary.occupancy_ratio:.1%} of {summary.num_blocks:,} blocks"),
        ("unfilled part of these blocks", f"{summary.waste_ratio:.1%}"),
        ("preemptions", f"{summary.num_preemptions:,} ({summary.num_preempted_tokens:,} tokens)"),
        ("prompt tokens found cached", f"{summary.prefix_hit_ratio:.1%}"),
        ("steps", f"{summary.num_steps:,} ({summary.num_leapt_steps:,} in leaps)"),
        ("virtual time", f"{summary.virtual_s:,.1f} s"),
        ("simulated in", f"{summary.wall_s:,.2f} s: {summary.real_time_factor:,.0f} x real time"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    times = Table(title="times, ms")
    for heading in ("", "", "mean", "p50", "p90", "p95", "p99", "max"):
        times.add_column(heading, justify="right" if heading else "left")
    for tenant in summary.tenants:
        rows = (
            ("queue", tenant.queue_s),
            ("TTFT", tenant.ttft_s),
            ("TPOT", tenant.tpot_s),
            ("end to end", tenant.latency_s),
        )
        for i, (name, values) in enumerate(rows):
            label = f"{tenant.name} ({tenant.num_requests:,})" if i == 0 else ""
            times.add_row(label, name, *_cells(values))
    console.print(times)


def _cells(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * 6
    numbers = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return [f"{number * 1e3:,.2f}" if number < 0.1 else f"{number * 1e3:,.0f}" for number in numbers]
