"""Runs of the simulator with small servers and simple cost models."""

from collections.abc import Sequence
from dataclasses import dataclass

from planning.arrivals import ClosedLoop
from planning.cost import CostModel
from planning.fit import FittedCost
from planning.lengths import Lengths
from planning.records import Records
from planning.server import Server
from planning.simulation import Horizon, Simulation
from planning.summary import Summary, summarize
from planning.workload import Job, JobSource, ListedJobs, Source, Tenant
from scheduler.core import SchedulerLimits
from scheduler.core.inspect.step_load import StepLoad

COST = FittedCost(
    overhead_s=5e-3,
    decode_s=1e-5,
    decode_pair_s=4e-8,
    prefill_s=1e-4,
    prefill_token_s=2e-5,
    prefill_pair_s=1e-10,
)
SERVER = Server(SchedulerLimits(64, 2048, 4096), num_blocks=4000)
SMALL = Lengths("short", 40.0, 30.0, 0.7, 200)


@dataclass(frozen=True, slots=True)
class Steady:
    """A cost model in which every step takes the same time."""

    duration_s: float

    def step_s(self, load: StepLoad) -> float:
        return self.duration_s


def run(
    jobs: Sequence[Job],
    cost: CostModel = COST,
    server: Server = SERVER,
    clients: ClosedLoop | None = None,
    **options: bool,
) -> Records:
    """Simulates a list of jobs."""
    source: JobSource = ListedJobs(jobs, clients)
    return Simulation(server, [source], cost, Horizon(num_requests=len(jobs)), **options).run()


def draw(
    tenants: Sequence[Tenant], horizon: Horizon, server: Server = SERVER, seed: int = 3, **options: bool
) -> Records:
    """Simulates jobs drawn from tenants."""
    max_model_len = server.limits.max_model_len
    sources = [Source(i, tenant, max_model_len, seed) for i, tenant in enumerate(tenants)]
    shares = any(tenant.num_system_tokens for tenant in tenants)
    return Simulation(server, sources, COST, horizon, has_shared_prefixes=shares, **options).run()


def summary(records: Records, server: Server = SERVER, names: Sequence[str] = ("requests",)) -> Summary:
    """Returns the summary of the records."""
    return summarize(records, names, server.num_blocks - 1, wall_s=1.0)
