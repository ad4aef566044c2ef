"""Runs the shipped scheduler core on a virtual clock.

    arrival ─► core.add       core.schedule ─► [ executor: one step after the other, cost.step_s each ] ─► core.commit

The clock has three kinds of events: a request arrives, a step is done, a delayed plan is due. At an event the
simulation does what the engine does: up to `max_in_flight` plans are in flight, a result is committed before the next
plan is made, and that plan is made before a client can react to the result. Requests end by their number of tokens;
no tokens are sampled.

While all sequences decode and no request arrives or ends, many steps are taken at once (`leap`); this gives the same
states in less time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from planning.cost import CostModel, step_costs
from planning.records import Records
from planning.series import Series
from planning.server import Server
from planning.workload import Job
from scheduler.core import CapacityExceeded, Events, QueueFull, Request, SequenceParams, StepResult, leap
from scheduler.core.inspect.step_load import LoadTracker, StepLoad
from scheduler.engine.plan_timing import Arrivals, could_join, lead_s

_SHARED_TOKENS_FROM = 1 << 31
"""First token id of system prompts. Lower ids belong to a single request."""

_REFUSAL_S = 0.01
"""Time until a client learns that it is refused, so that a client which is always refused does not stop the clock."""

_MIN_LEAP = 3
"""Minimum number of steps of a leap; for fewer it costs more than it saves."""


class JobSource(Protocol):
    """A source of jobs; `planning.workload` has two."""

    def first(self) -> list[Job]:
        """Returns the jobs that the simulation starts with."""
        ...

    def after_arrival(self) -> list[Job]:
        """Returns the jobs that follow when a job of this source has arrived."""
        ...

    def after_end(self, now_s: float) -> list[Job]:
        """Returns the jobs that follow when a request of this source has ended or was refused."""
        ...


@dataclass(frozen=True, slots=True)
class Horizon:
    """The point after which the sources give no more requests; those that have arrived are served to their end."""

    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("a simulation needs a number of requests or a duration")


@dataclass(slots=True)
class _Flight:
    """A plan in flight."""

    step_id: int
    planned_s: float
    done_s: float
    load: StepLoad
    has_first_tokens: bool


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
        self.scheduler = server.scheduler(has_shared_prefixes=has_shared_prefixes)
        self.scheduler.set_costs(step_costs(cost))
        self.records = Records(server.num_blocks - 1, horizon.duration_s)
        self.now_s = 0.0
        self._cost = cost
        self._leaps = leaps
        self._tells_time = server.batching.timeout_s > 0
        self._sources = sources
        self._horizon = horizon
        self._loads = LoadTracker()
        self._in_flight: deque[_Flight] = deque()
        self._max_in_flight = server.limits.max_in_flight
        self._done_s = 0.0  # end of the last step that was committed
        self._free_s = 0.0  # end of the last step that was sent
        self._num_requests = 0
        self._num_jobs = 0
        self._arrivals: list[tuple[float, int, Job]] = []
        self._seen = Arrivals()
        self._zeros: list[int] = []
        self._params: dict[int, SequenceParams] = {}

    def run(self, progress: Callable[[float, int], None] | None = None, every: int = 2048) -> Records:
        """Runs to the end; calls `progress` with the virtual time and the number of ended requests once in a while."""
        for source in self._sources:
            self._expect(source.first())
        num_events = 0
        while self._advance():
            num_events += 1
            if progress is not None and num_events % every == 0:
                progress(self.now_s, self.records.num_ended)
        self.records.close(self.now_s, self.scheduler)
        return self.records

    def _advance(self) -> bool:
        """Processes one event; returns False if there is none left."""
        arrival_s = self._arrivals[0][0] if self._arrivals else inf
        done_s = self._in_flight[0].done_s if self._in_flight else inf
        if len(self._in_flight) < self._max_in_flight and (due_s := self._due_s()) <= min(arrival_s, done_s):
            self.now_s = max(self.now_s, due_s)
            if self._tells_time:
                self.scheduler.expire(self.now_s)
            if self._send_plan():
                return True
        if self._tells_time and self._wake(min(arrival_s, done_s)):
            return True
        if done_s <= arrival_s and self._in_flight:
            self._commit()
            if self._leaps and self._loads.num_decodes and len(self._in_flight) == self._max_in_flight - 1:
                self._leap(self._arrivals[0][0] if self._arrivals else inf)  # a request that ended may add an arrival
            return True
        if self._arrivals:
            self._arrive()
            return True
        if self.scheduler.num_unfinished_requests:
            raise RuntimeError(f"the core makes no plan, but {self.scheduler.num_unfinished_requests} requests wait")
        return False

    def _wake(self, next_s: float) -> bool:
        """Advances the clock of the core if a timeout, such as that of a dynamic batch, is the next event.

        Returns False if another event comes first.
        """
        due_s = self.scheduler.next_wake_s
        if due_s is None or due_s >= next_s:
            return False
        self.now_s = max(self.now_s, due_s)
        self.scheduler.expire(self.now_s)
        return True

    # --- requests ---------------------------------------------------------------------------------------------

    def _expect(self, jobs: list[Job]) -> None:
        horizon = self._horizon
        for job in jobs:
            if horizon.num_requests is not None and self._num_jobs >= horizon.num_requests:
                return
            if horizon.duration_s is not None and job.arrival_s > horizon.duration_s:
                continue
            self._num_jobs += 1
            heappush(self._arrivals, (job.arrival_s, self._num_jobs, job))

    def _arrive(self) -> None:
        self.now_s, _, job = heappop(self._arrivals)
        self.records.pass_until(self.now_s, self.scheduler)
        self._seen.add(self.now_s)
        self._num_requests += 1
        request_id = self._num_requests
        try:
            self.scheduler.add(self._request(request_id, job), self.now_s)
        except (CapacityExceeded, QueueFull) as error:
            self.records.refused(is_too_long=isinstance(error, CapacityExceeded))
            self._expect(self._sources[job.tenant].after_end(self.now_s + _REFUSAL_S))
        else:
            self.records.arrived(request_id, job)
        self._expect(self._sources[job.tenant].after_arrival())

    def _request(self, request_id: int, job: Job) -> Request:
        """Makes a request whose prompt shares only the tenant's system prompt with others."""
        num_own = job.num_prompt_tokens - job.num_shared_tokens
        prompt = [_SHARED_TOKENS_FROM + job.tenant] * job.num_shared_tokens + [request_id] * num_own
        max_total = job.num_prompt_tokens + job.num_output_tokens
        params = self._params.get(max_total)
        if params is None:
            params = self._params[max_total] = SequenceParams(max_total_tokens=max_total)
        return Request(request_id, prompt, params, priority=job.priority)

    # --- steps ------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        """Returns the time at which the engine makes its next plan (see scheduler/engine/plan_timing.py)."""
        if not self._in_flight or not could_join(self.scheduler):
            return self.now_s
        newest = self._in_flight[-1]
        step_s = self._cost.step_s(newest.load)
        hold_s = step_s - lead_s(step_s)
        return newest.done_s - lead_s(step_s) if self._seen.are_likely(self.now_s, hold_s) else self.now_s

    def _send_plan(self) -> bool:
        """Sends the next plan to the simulated executor; returns False if there is none."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        load = self._loads.follow(plan)
        self._free_s = max(self.now_s, self._free_s) + self._cost.step_s(load)
        has_first_tokens = load.num_sampled > load.num_decodes
        self._in_flight.append(_Flight(plan.step_id, self.now_s, self._free_s, load, has_first_tokens))
        return True

    def _commit(self) -> None:
        flight = self._in_flight.popleft()
        num_sampled = flight.load.num_sampled
        if len(self._zeros) < num_sampled:
            self._zeros = [0] * (2 * num_sampled)
        started_s = max(self._done_s, flight.planned_s)
        self.now_s = self._done_s = flight.done_s
        self.records.step(self.now_s, started_s, flight.load, self.scheduler)
        events = self.scheduler.commit(StepResult(1, flight.step_id, self._zeros[:num_sampled]))
        if events.started or flight.has_first_tokens or events.finished:
            self._record(events, flight)

    def _record(self, events: Events, flight: _Flight) -> None:
        records = self.records
        for sequence in events.started:
            records.started(sequence.request.request_id, flight.planned_s, sequence.num_cached_tokens or 0)
        if flight.has_first_tokens:
            for sequence in events.sequences:
                if len(sequence.token_ids) == sequence.num_prompt_tokens + 1:
                    records.first_token(sequence.request.request_id, self.now_s)
        for sequence, _ in events.finished:
            job = records.ended(sequence.request.request_id, self.now_s, sequence.num_tokens, sequence.num_preemptions)
            self._expect(self._sources[job.tenant].after_end(self.now_s))

    # --- leaps ------------------------------------------------------------------------------------------------

    def _leap(self, arrival_s: float) -> None:
        """Schedules and commits many steps at once: until the next arrival, or as many as the core allows.

        now          T1           T2           T3
         │ in flight │ planned 1  │ planned 2  │ planned 3       max_in_flight 2: three pairs of schedule and commit
         └ plan 1    └ 1 in, 2    └ 2 in, 3    └ 3 in            end at T3; the third plan is then in flight
        """
        num_in_flight = len(self._in_flight)
        num_decodes = self._loads.num_decodes
        num_seated = self.scheduler.state.limits.max_num_seqs - self.scheduler.state.batch.num_free_slots
        if not num_decodes == self._loads.num_slots == num_seated:
            return  # a sequence computes its prompt, or has started or ended and is not in a plan yet
        free_s = max(self.now_s, self._free_s)
        if arrival_s < free_s:
            return
        steps_s = self._next_decodes_s()
        max_steps = num_in_flight + steps_s.num_terms_within(arrival_s - free_s)
        if max_steps < _MIN_LEAP:
            return
        num_steps = leap(self.scheduler, max_steps)
        if num_steps > 0:
            self._after_leap(num_steps, num_in_flight, free_s, steps_s)

    def _next_decodes_s(self) -> Series:
        """Returns the durations of the next steps in which all sequences decode."""
        num_decodes, context = self._loads.num_decodes, self._loads.num_decode_context
        first_s, second_s = (
            self._cost.step_s(StepLoad(num_decodes, context + i * num_decodes, num_sampled=num_decodes)) for i in (1, 2)
        )
        return Series(first_s, second_s - first_s)

    def _after_leap(self, num_steps: int, num_in_flight: int, free_s: float, steps_s: Series) -> None:
        """Sets clock, flights and records to the state after num_steps pairs of schedule and commit."""
        loads, started_s = self._loads, self.now_s
        num_decodes, context = loads.num_decodes, loads.num_decode_context
        flights = list(self._in_flight)
        for i in range(max(0, num_steps - num_in_flight), num_steps):  # planned and not committed
            if i > num_in_flight:
                planned_s = free_s + steps_s.total(i - num_in_flight)
            else:
                planned_s = self.now_s if i == 0 else flights[i - 1].done_s
            load = StepLoad(num_decodes, context + (i + 1) * num_decodes, num_sampled=num_decodes)
            done_s = free_s + steps_s.total(i + 1)
            flights.append(_Flight(self.scheduler.state.step_id - num_steps + 1 + i, planned_s, done_s, load, False))
        if num_steps >= num_in_flight:
            self.now_s = free_s + steps_s.total(num_steps - num_in_flight)
            self._in_flight = deque(flights[num_in_flight:])
        else:
            self.now_s = flights[num_steps - 1].done_s
            self._in_flight = deque(flights[num_steps:])
        self._done_s = self.now_s
        self._free_s = free_s + steps_s.total(num_steps)
        loads.skip(num_steps)
        self.records.leap(self.now_s, started_s, num_steps, num_decodes, self.scheduler)
