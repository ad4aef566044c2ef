"""From settings to a simulation that has run: what `quire simulate` does, as a function."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scheduler.core as core
from planning.cost import CostModel
from planning.demand import find_demand
from planning.deployment import Deployment, deploy
from planning.errors import PlanningError
from planning.fit import fit_cost
from planning.measured_steps import read_steps, timed
from planning.records import Records
from planning.roofline import Roofline
from planning.server import Server
from planning.settings import SimulateSettings
from planning.simulation import Simulation
from planning.summary import Summary, summarize
from scheduler.core import POLICIES, Limits

_DEFAULT_MAX_MODEL_LEN = 8192

Progress = Callable[[float, int], None]
"""Told of virtual seconds, and of requests that have ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    deployment: Deployment
    summary: Summary
    records: Records


def simulate(model: str, settings: SimulateSettings, progress: Progress | None = None) -> Outcome:
    """Raises PlanningError."""
    if settings.max_model_len is None:
        reach = deploy(model, settings).max_model_len
        settings = replace(settings, max_model_len=min(reach, _DEFAULT_MAX_MODEL_LEN))
    deployment = deploy(model, settings)
    server = make_server(deployment, settings)
    demand = find_demand(settings, deployment.max_model_len)
    cost = _cost(deployment, settings)
    simulation = Simulation(
        server, demand.sources, cost, demand.horizon, has_shared_prefixes=demand.has_shared_prefixes
    )
    started_s = time.perf_counter()
    records = simulation.run(progress)
    wall_s = time.perf_counter() - started_s
    return Outcome(deployment, summarize(records, demand.names, deployment.num_usable_blocks, wall_s), records)


def make_server(deployment: Deployment, settings: SimulateSettings) -> Server:
    """Raises PlanningError."""
    if settings.policy not in POLICIES:
        raise PlanningError(f"policy: {settings.policy!r} is not one of {', '.join(POLICIES)}")
    try:
        limits = Limits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=deployment.max_model_len,
            max_in_flight=settings.max_in_flight,
            max_waiting_requests=1 << 40,  # a simulated queue has no bound: how long it gets is what one wants to see
            max_waiting_prompt_tokens=1 << 60,
        )
    except ValueError as error:
        raise PlanningError(str(error)) from None
    return Server(
        limits,
        num_blocks=deployment.num_blocks,
        block_size=deployment.block_size,
        policy=POLICIES[settings.policy],
        modes=_modes(settings),
    )


def _modes(settings: SimulateSettings) -> tuple[tuple[str, Any], ...]:
    """Raises PlanningError for a mode that the core does not have."""
    modes = []
    for field, table in (("batching", "BATCHING"), ("memory", "MEMORY")):
        name = getattr(settings, field)
        if name is not None:
            known: dict[str, Any] = getattr(core, table, {})
            if name not in known:
                raise PlanningError(
                    f"{field}: {name!r} is not one of {', '.join(known) or 'those of this core, which has none'}"
                )
            modes.append((field, known[name]))
    return tuple(modes)


def _cost(deployment: Deployment, settings: SimulateSettings) -> CostModel:
    if settings.fit is not None:
        return fit_cost(*(timed(read_steps(Path(name))) for name in settings.fit.split(","))).cost
    return Roofline(
        deployment.model,
        deployment.device,
        tensor_parallel=deployment.tensor_parallel,
        dtype_bytes=deployment.dtype_bytes,
    )
