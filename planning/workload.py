"""The workload of a simulated server: tenants, each with its arrivals, its lengths and its system prompt."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from planning.arrivals import Arrivals, ClosedLoop
from planning.lengths import LengthSource
from scheduler.core import TenantTerms


@dataclass(frozen=True, slots=True)
class Tenant:
    """A source of similar requests.

    terms              what the core grants it, if the server has tenants
    num_system_tokens  length of the system prompt, in addition to `lengths`; the prefix cache can find it
    system_share       share of the requests that begin with a system prompt
    num_system_prompts number of different system prompts
    system_skew        the k-th of them is drawn with a weight of k ** -system_skew (Zipf)
    """

    name: str
    arrivals: Arrivals
    lengths: LengthSource
    terms: TenantTerms = field(default_factory=TenantTerms)
    num_system_tokens: int = 0
    system_share: float = 1.0
    num_system_prompts: int = 1
    system_skew: float = 0.9


@dataclass(frozen=True, slots=True)
class Job:
    """A request that arrives at `arrival_s`.

    tenant             number of its source
    num_shared_tokens  number of its prompt tokens that are a system prompt of the tenant
    priority           its place among the requests of its tenant, under the priority policy: lower runs earlier
    system_prompt      which one
    """

    arrival_s: float
    tenant: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    priority: int = 0
    system_prompt: int = 0


class Source:
    """Draws the jobs of one tenant when they are due.

    A seed determines the stream of jobs, independent of the server.
    """

    def __init__(self, index: int, tenant: Tenant, max_model_len: int, seed: int) -> None:
        self._index = index
        self._tenant = tenant
        self._max_model_len = max_model_len - tenant.num_system_tokens
        self._lengths_rng = random.Random(f"{seed} lengths {index}")
        ranks = range(1, tenant.num_system_prompts + 1)
        self._system_weights = list(accumulate(rank**-tenant.system_skew for rank in ranks))
        self._times_s: Iterator[float] | None = None
        if not isinstance(tenant.arrivals, ClosedLoop):
            self._times_s = tenant.arrivals.times_s(random.Random(f"{seed} arrivals {index}"))

    def first(self) -> list[Job]:
        """Returns the jobs that the simulation starts with."""
        arrivals = self._tenant.arrivals
        if isinstance(arrivals, ClosedLoop):
            return [self._job(0.0) for _ in range(arrivals.num_clients)]
        return self.after_arrival()

    def after_arrival(self) -> list[Job]:
        """Returns the next job of an open loop, after one has arrived."""
        return [] if self._times_s is None else [self._job(next(self._times_s))]

    def after_end(self, now_s: float) -> list[Job]:
        """Returns the next job of a client of a closed loop, after its request has ended or was refused."""
        arrivals = self._tenant.arrivals
        return [self._job(now_s + arrivals.turnaround_s)] if isinstance(arrivals, ClosedLoop) else []

    def _job(self, arrival_s: float) -> Job:
        tenant, rng = self._tenant, self._lengths_rng
        num_prompt_tokens, num_output_tokens = tenant.lengths.draw(rng, self._max_model_len)
        num_shared = tenant.num_system_tokens if tenant.num_system_tokens and rng.random() < tenant.system_share else 0
        system_prompt = 0
        if num_shared and tenant.num_system_prompts > 1:
            system_prompt = bisect_right(self._system_weights, rng.random() * self._system_weights[-1])
        return Job(
            arrival_s,
            self._index,
            num_prompt_tokens + num_shared,
            num_output_tokens,
            num_shared,
            system_prompt=min(system_prompt, tenant.num_system_prompts - 1),
        )


class ListedJobs:
    """A source with a list of jobs: at their given times, or in the given order for the clients of a closed loop."""

    def __init__(self, jobs: Sequence[Job], closed_loop: ClosedLoop | None = None) -> None:
        self._jobs = iter(jobs)
        self._closed_loop = closed_loop

    def first(self) -> list[Job]:
        if self._closed_loop is None:
            return self.after_arrival()
        return [job for _ in range(self._closed_loop.num_clients) for job in self._next(0.0)]

    def after_arrival(self) -> list[Job]:
        job = next(self._jobs, None) if self._closed_loop is None else None
        return [job] if job else []

    def after_end(self, now_s: float) -> list[Job]:
        return [] if self._closed_loop is None else self._next(now_s + self._closed_loop.turnaround_s)

    def _next(self, arrival_s: float) -> list[Job]:
        job = next(self._jobs, None)
        if job is None:
            return []
        return [replace(job, arrival_s=arrival_s)]


JobSource = Source | ListedJobs
