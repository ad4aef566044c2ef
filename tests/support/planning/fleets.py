"""Runs of simulated fleets of small servers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planning.arrivals import Poisson
from planning.fleet.fleet import Fleet
from planning.fleet.records import FleetRecords
from planning.fleet.simulation import FleetSimulation
from planning.server import Server
from planning.simulation import Horizon
from planning.workload import Job, ListedJobs, Source, Tenant
from scheduler.core import SchedulerLimits
from tests.support.planning.simulations import COST, SERVER, SMALL

SHARING = Tenant("sharing", Poisson(40.0), SMALL, num_system_tokens=320, num_system_prompts=12)
"""A tenant whose prompts begin with one of 12 system prompts of 20 blocks."""

TIGHT = Server(SchedulerLimits(16, 512, 1024), num_blocks=160)
"""A server whose pool holds a few system prompts only."""


def simulation_of(jobs: Sequence[Job], fleet: Fleet, server: Server = SERVER, **options: Any) -> FleetSimulation:
    """Returns the simulation of listed jobs, which arrive at their times."""
    options = {"is_closed_loop": False} | options
    return FleetSimulation(fleet, server, [ListedJobs(jobs)], COST, Horizon(num_requests=len(jobs)), **options)


def run_jobs(jobs: Sequence[Job], fleet: Fleet, server: Server = SERVER, **options: Any) -> FleetRecords:
    return simulation_of(jobs, fleet, server, **options).run()


def sharing(fleet: Fleet, num_requests: int = 150, server: Server = TIGHT, rate: float = 40.0) -> FleetSimulation:
    """Returns the simulation of requests that share system prompts."""
    source = Source(0, replace(SHARING, arrivals=Poisson(rate)), server.limits.max_model_len, seed=3)
    horizon = Horizon(num_requests=num_requests)
    return FleetSimulation(fleet, server, [source], COST, horizon, has_shared_prefixes=True, is_closed_loop=False)
