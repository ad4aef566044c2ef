"""Shows the outcome of a simulated fleet as tables."""

from rich.console import Console

from planning.fleet.run import FleetOutcome
from planning.settings import SimulateSettings
from planning.simulate_view import described_device, show_tables


def show(outcome: FleetOutcome, settings: SimulateSettings, console: Console) -> None:
    """Prints the summary, and the distributions of times for each tenant."""
    summary, name = outcome.summary, outcome.deployment.model.name
    device = described_device(outcome.deployment, settings)
    title = f"{summary.num_replicas:,} replicas of {name}, each on {device}, {settings.routing} (simulated)"
    facts = (
        ("requests", f"{summary.num_requests:,}"),
        ("refused", f"{summary.num_refused:,}"),
        ("requests/s", f"{summary.requests_per_s:,.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:,.1f}"),
        ("all tokens/s", f"{summary.total_tokens_per_s:,.1f}"),
        ("prompt tokens found cached", f"{summary.prefix_hit_ratio:.1%}"),
        ("executors busy", f"{summary.busy_ratio:.1%}"),
        ("requests of the busiest replica / mean", f"{summary.request_imbalance:.2f}"),
        ("computing time of the busiest replica / mean", f"{summary.busy_imbalance:.2f}"),
        ("longest queue of a replica", f"{summary.max_waiting:,}"),
        ("preemptions", f"{summary.num_preemptions:,}"),
        ("deaths of replicas, resumed streams", f"{summary.num_deaths:,}, {summary.num_resumptions:,}"),
        ("lost reports, gaps that routers noticed", f"{summary.num_lost_reports:,}, {summary.num_gaps:,}"),
        ("steps", f"{summary.num_steps:,}"),
        ("virtual time", f"{summary.virtual_s:,.1f} s"),
        ("simulated in", f"{summary.wall_s:,.2f} s: {summary.real_time_factor:,.1f} x real time"),
    )
    show_tables(title, facts, summary.tenants, console)
