"""Shows the outcome of a simulation as tables."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from planning.deployment import Deployment
from planning.run import Outcome
from planning.settings import SimulateSettings
from planning.summary import Distribution, TenantSummary


def show(outcome: Outcome, settings: SimulateSettings, console: Console) -> None:
    """Prints the summary, and the distributions of times for each tenant."""
    summary, deployment = outcome.summary, outcome.deployment
    title = f"{deployment.model.name} on {described_device(deployment, settings)} (simulated)"
    facts = (
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
    )
    show_tables(title, facts, summary.tenants, console)


def described_device(deployment: Deployment, settings: SimulateSettings) -> str:
    """Returns where the times of steps come from."""
    if settings.fit:
        return f"steps measured in {settings.fit}"
    return f"{deployment.tensor_parallel} x {deployment.device.name}, roofline"


def show_tables(
    title: str, facts: Iterable[tuple[str, str]], tenants: Iterable[TenantSummary], console: Console
) -> None:
    """Prints facts, each with its name, and the distributions of times for each tenant."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for fact in facts:
        table.add_row(*fact)
    console.print(table)
    times = Table(title="times, ms (simulated)")
    for heading in ("", "", "mean", "p50", "p90", "p95", "p99", "max"):
        times.add_column(heading, justify="right" if heading else "left")
    for tenant in tenants:
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
