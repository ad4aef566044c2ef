"""Builds and runs the simulation of the fleet that the settings describe."""

import random
import time
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from gateway.routing.choice import POLICIES
from planning.arrivals import MAX_NUMBER
from planning.demand import find_demand, refuse
from planning.deployment import Deployment
from planning.errors import PlanningError
from planning.fleet.failures import Failures, parse_failures
from planning.fleet.fleet import ORACLE, Fleet
from planning.fleet.records import FleetRecords
from planning.fleet.simulation import FleetSimulation
from planning.fleet.summary import FleetSummary, summarize_fleet
from planning.run import Progress, make_cost, make_deployment, make_server
from planning.settings import SimulateSettings

MAX_REPLICAS = 10_000
MAX_ROUTERS = 1_000
MAX_BLOCKS = 50_000_000
"""Most blocks of all replicas. Each takes some 150 bytes."""
_FLEET_SETTINGS = ("routing", "routers", "event_delay_ms", "event_loss", "failures", "mean_failure_s", "repair_s")
"""The settings that mean nothing for a single server without a router."""


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """The result of a simulation."""

    deployment: Deployment
    summary: FleetSummary
    records: FleetRecords


def simulate_fleet(model: str, settings: SimulateSettings, progress: Progress | None = None) -> FleetOutcome:
    """Simulates replicas behind routers. Raises PlanningError."""
    fleet = make_fleet(settings)
    deployment = make_deployment(model, settings)
    num_blocks = fleet.num_replicas * deployment.num_blocks
    if num_blocks > MAX_BLOCKS:
        raise PlanningError(
            f"num_blocks: at most {MAX_BLOCKS:,} are simulated, and {fleet.num_replicas:,} replicas of "
            f"{deployment.num_blocks:,} have {num_blocks:,}"
        )
    demand = find_demand(settings, deployment.max_model_len)
    simulation = FleetSimulation(
        fleet,
        replace(make_server(deployment, settings), tenants=demand.terms),
        demand.sources,
        make_cost(deployment, settings),
        demand.horizon,
        has_shared_prefixes=demand.has_shared_prefixes,
        is_closed_loop=demand.is_closed_loop,
        seed=settings.seed,
    )
    started_s = time.perf_counter()
    records = simulation.run(None if progress is None else partial(progress, demand.horizon))
    wall_s = time.perf_counter() - started_s
    return FleetOutcome(deployment, summarize_fleet(records, demand.names, wall_s), records)


def check_has_no_fleet(settings: SimulateSettings) -> None:
    """Raises PlanningError if a setting of fleets is given without a number of replicas."""
    refuse(settings, _FLEET_SETTINGS, "requires replicas")


def make_fleet(settings: SimulateSettings) -> Fleet:
    """Returns the fleet that the settings describe. Raises PlanningError, which names the setting."""
    num_replicas = settings.replicas or 0
    policies = (*POLICIES, ORACLE)
    mean_s = inf if settings.mean_failure_s is None else settings.mean_failure_s
    for is_valid, message in (
        (1 <= num_replicas <= MAX_REPLICAS, f"replicas: from 1 to {MAX_REPLICAS}, not {num_replicas}"),
        (settings.routing in policies, f"routing: {settings.routing!r} is not one of {', '.join(policies)}"),
        (1 <= settings.routers <= MAX_ROUTERS, f"routers: from 1 to {MAX_ROUTERS}, not {settings.routers}"),
        (
            0 <= settings.event_delay_ms <= MAX_NUMBER,
            f"event_delay_ms: from 0 to {MAX_NUMBER:g}, not {settings.event_delay_ms}",
        ),
        (0 <= settings.event_loss < 1, f"event_loss: from 0 to below 1, not {settings.event_loss}"),
        (
            settings.mean_failure_s is None or 1 <= settings.mean_failure_s <= MAX_NUMBER,
            f"mean_failure_s: from 1 to {MAX_NUMBER:g}, not {settings.mean_failure_s}",
        ),
        (
            0 < settings.repair_s <= MAX_NUMBER,
            f"repair_s: must be above 0 and at most {MAX_NUMBER:g}, not {settings.repair_s}",
        ),
    ):
        if not is_valid:
            raise PlanningError(message)
    return Fleet(
        num_replicas,
        settings.routing,
        settings.routers,
        settings.event_delay_ms / 1e3,
        settings.event_loss,
        Failures(
            parse_failures(settings.failures, num_replicas),
            mean_s,
            settings.repair_s,
            random.Random(f"{settings.seed} failures"),
        ),
    )
