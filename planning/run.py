"""Builds and runs the simulation that the settings describe."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from planning.arrivals import MAX_NUMBER
from planning.cost import CostModel
from planning.demand import find_demand
from planning.deployment import Deployment, check_fits, deploy
from planning.errors import PlanningError
from planning.fit import fit_cost
from planning.measured_steps import read_steps, timed
from planning.records import Records
from planning.roofline import Roofline
from planning.server import Server
from planning.settings import SimulateSettings
from planning.simulation import Horizon, Simulation
from planning.summary import Summary, summarize
from scheduler.core import BATCHING, KV_ALLOCATIONS, POLICIES, SchedulerLimits

_DEFAULT_MAX_MODEL_LEN = 8192

MAX_BLOCKS = 10_000_000
"""Most blocks of a simulated pool. Each takes some 150 bytes."""

Progress = Callable[[Horizon, float, int], None]
"""Called with the end of the simulation, the virtual seconds, and the number of requests that have ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation."""

    deployment: Deployment
    summary: Summary
    records: Records


def simulate(model: str, settings: SimulateSettings, progress: Progress | None = None) -> Outcome:
    """Simulates a server for the requests that the settings describe. Raises PlanningError."""
    deployment = make_deployment(model, settings)
    demand = find_demand(settings, deployment.max_model_len)
    server = replace(make_server(deployment, settings), tenants=demand.terms)
    cost = make_cost(deployment, settings)
    simulation = Simulation(
        server, demand.sources, cost, demand.horizon, has_shared_prefixes=demand.has_shared_prefixes
    )
    started_s = time.perf_counter()
    records = simulation.run(None if progress is None else partial(progress, demand.horizon))
    wall_s = time.perf_counter() - started_s
    return Outcome(deployment, summarize(records, demand.names, deployment.num_usable_blocks, wall_s), records)


def make_server(deployment: Deployment, settings: SimulateSettings) -> Server:
    """Returns the simulated server that the settings describe. Raises PlanningError."""
    for name, known in (("policy", POLICIES), ("batching", BATCHING), ("memory", KV_ALLOCATIONS)):
        if getattr(settings, name) not in known:
            raise PlanningError(f"{name}: {getattr(settings, name)!r} is not one of {', '.join(known)}")
    if not 0 < settings.target_inter_token_latency_ms <= MAX_NUMBER:
        raise PlanningError(f"target_inter_token_latency_ms: must be above 0 and at most {MAX_NUMBER:g}")
    try:
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=deployment.max_model_len,
            max_in_flight=settings.max_in_flight,
            target_inter_token_latency_s=settings.target_inter_token_latency_ms / 1e3,
            max_waiting_requests=1 << 40,  # no limit, so that the result shows how long the queue gets
            max_waiting_prompt_tokens=1 << 60,
        )
    except ValueError as error:
        raise PlanningError(str(error)) from None
    return Server(
        limits,
        num_blocks=deployment.num_blocks,
        block_size=deployment.block_size,
        policy=POLICIES[settings.policy],
        batching=BATCHING[settings.batching],
        memory=KV_ALLOCATIONS[settings.memory],
    )


def make_deployment(model: str, settings: SimulateSettings) -> Deployment:
    """Returns the deployment, with a limit of the sequences' length that suits simulations.

    Raises PlanningError, also if the pool does not fit the device, unless its steps were measured: then it is another.
    """
    if settings.max_model_len is None:
        reach = deploy(model, settings).max_model_len
        settings = replace(settings, max_model_len=min(reach, _DEFAULT_MAX_MODEL_LEN))
    deployment = deploy(model, settings)
    if settings.fit is None:
        check_fits(deployment)
    if deployment.num_blocks > MAX_BLOCKS:
        raise PlanningError(f"num_blocks: at most {MAX_BLOCKS:,} are simulated, not {deployment.num_blocks:,}")
    return deployment


def make_cost(deployment: Deployment, settings: SimulateSettings) -> CostModel:
    """Returns the cost of steps: fitted to measured ones, or by the data sheet. Raises PlanningError."""
    if settings.fit is not None:
        return fit_cost(*(timed(read_steps(Path(name))) for name in settings.fit.split(","))).cost
    return Roofline(
        deployment.model,
        deployment.device,
        tensor_parallel=deployment.tensor_parallel,
        dtype_bytes=deployment.dtype_bytes,
    )
