"""Simulates one server: requests of several sources arrive at the shipped scheduler core on a virtual clock.

The clock has three kinds of events: a request arrives, a step is done, a delayed plan is due. The last two are those of
the virtual server (virtual_server.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from planning.cost import CostModel
from planning.records import OpenRequest, Records
from planning.request_factory import RequestFactory
from planning.server import Server
from planning.virtual_server import VirtualServer
from planning.workload import Job, JobSource
from scheduler.core import CapacityExceeded, Events, QueueFull
from scheduler.core.inspect.step_load import StepLoad

REFUSAL_S = 0.01
"""Time until a client learns that it is refused, so that a client which is always refused does not stop the clock."""


PROGRESS_INTERVAL = 2048
"""Number of events between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """The point after which the sources give no more requests; those that have arrived are served to their end."""

    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("a simulation needs a number of requests or a duration")

    def before(self, jobs: Sequence[Job], num_jobs: int) -> Sequence[Job]:
        """Returns those of the jobs that arrive before the horizon, if `num_jobs` others do."""
        if self.duration_s is not None:
            jobs = [job for job in jobs if job.arrival_s <= self.duration_s]
        return jobs if self.num_requests is None else jobs[: self.num_requests - num_jobs]


class Simulation:
    """One run of a simulated server; `records` holds the result."""

    def __init__(
        self,
        server: Server,
        sources: Sequence[JobSource],
        cost: CostModel,
        horizon: Horizon,
        *,
        has_shared_prefixes: bool = False,
        leaps: bool = True,
    ) -> None:
        self._server = VirtualServer(server, cost, self, has_shared_prefixes=has_shared_prefixes, leaps=leaps)
        self.scheduler = self._server.scheduler
        self.records = Records(server.num_blocks - 1, horizon.duration_s)
        self._sources = sources
        self._horizon = horizon
        self._num_requests = 0
        self._num_jobs = 0
        self._arrivals: list[tuple[float, int, Job]] = []
        self._requests = RequestFactory(server)

    @property
    def now_s(self) -> float:
        return self._server.now_s

    def run(self, progress: Callable[[float, int], None] | None = None) -> Records:
        """Runs to the end; calls `progress` with the virtual time and the number of ended requests once in a while."""
        for source in self._sources:
            self._expect(source.first())
        num_events = 0
        while self._advance():
            num_events += 1
            if progress is not None and num_events % PROGRESS_INTERVAL == 0:
                progress(self.now_s, self.records.num_ended)
        self.records.close(self.now_s, self.scheduler)
        return self.records

    def _advance(self) -> bool:
        """Processes one event; returns False if there is none left."""
        if self._server.advance(self._next_arrival_s(), self._leap_until_s):
            return True
        if self._arrivals:
            self._arrive()
            return True
        if self.scheduler.num_unfinished_requests:
            raise RuntimeError(f"the core makes no plan, but {self.scheduler.num_unfinished_requests} requests wait")
        return False

    def _next_arrival_s(self) -> float:
        return self._arrivals[0][0] if self._arrivals else inf

    def _leap_until_s(self) -> float:
        """Returns the time up to which steps can be taken at once: a request arrives there, or a sample is due."""
        return min(self._next_arrival_s(), self.records.next_sample_s)

    # --- requests ---------------------------------------------------------------------------------------------

    def _expect(self, jobs: list[Job]) -> None:
        for job in self._horizon.before(jobs, self._num_jobs):
            self._num_jobs += 1
            heappush(self._arrivals, (job.arrival_s, self._num_jobs, job))

    def _arrive(self) -> None:
        now_s, _, job = heappop(self._arrivals)
        self.records.pass_until(now_s, self.scheduler)
        self._num_requests += 1
        request_id = self._num_requests
        try:
            self._server.add(self._requests.make(request_id, job), now_s)
        except (CapacityExceeded, QueueFull):
            self.records.num_refused += 1
            self._expect(self._sources[job.tenant].after_end(now_s + REFUSAL_S))
        else:
            self.records.open[request_id] = OpenRequest(job)
        self._expect(self._sources[job.tenant].after_arrival())

    # --- what the server has done -----------------------------------------------------------------------------

    def stepped(self, now_s: float, started_s: float, load: StepLoad) -> None:
        self.records.step(now_s, started_s, load, self.scheduler)

    def leapt(
        self, now_s: float, started_s: float, num_steps: int, num_decodes: int, num_free_blocks_before: int
    ) -> None:
        self.records.leap(now_s, started_s, num_steps, num_decodes, num_free_blocks_before, self.scheduler)

    def committed(self, now_s: float, planned_s: float, events: Events, *, has_first_tokens: bool) -> None:
        records = self.records
        _, ended = records.requests.committed(records.open, now_s, planned_s, events, has_first_tokens=has_first_tokens)
        for request in ended:
            self._expect(self._sources[request.job.tenant].after_end(now_s))
