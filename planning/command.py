"""`quire plan` and `quire simulate` as functions that compute and print."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from planning import plan_view, simulate_view
from planning.capacity import find_capacity
from planning.deployment import check_fits, deploy
from planning.fleet import view
from planning.fleet.run import FleetOutcome, check_has_no_fleet, simulate_fleet
from planning.run import Outcome, simulate
from planning.settings import DeploymentSettings, SimulateSettings
from planning.simulation import Horizon
from planning.summary import timeline


def run_plan(model: str, settings: DeploymentSettings, console: Console, *, as_json: bool) -> None:
    """Prints the plan of a deployment. Raises PlanningError."""
    deployment = deploy(model, settings)
    check_fits(deployment)
    capacity = find_capacity(deployment)
    if as_json:
        _print_json(plan_view.as_values(deployment, capacity))
    else:
        plan_view.show(deployment, capacity, console)


def run_simulate(model: str, settings: SimulateSettings, console: Console, *, as_json: bool) -> None:
    """Simulates a server or a fleet, with a progress bar on stderr, and prints the outcome. Raises PlanningError."""
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)

        def progress(horizon: Horizon, now_s: float, num_ended: int) -> None:
            total = horizon.duration_s if horizon.num_requests is None else horizon.num_requests
            done = now_s if horizon.num_requests is None else num_ended
            description = f"{num_ended:,} requests, {now_s:,.0f} virtual seconds"
            bar.update(task, total=total, completed=done, description=description)

        outcome: Outcome | FleetOutcome
        if settings.replicas is None:
            check_has_no_fleet(settings)
            outcome = simulate(model, settings, progress)
        else:
            outcome = simulate_fleet(model, settings, progress)
    if as_json:
        values = {
            "model": outcome.deployment.model.name,
            "is_simulated": True,
            "settings": asdict(settings),
            "summary": asdict(outcome.summary),
        }
        _print_json(values | ({"timeline": timeline(outcome.records)} if isinstance(outcome, Outcome) else {}))
    elif isinstance(outcome, Outcome):
        simulate_view.show(outcome, settings, console)
    else:
        view.show(outcome, settings, console)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2))
