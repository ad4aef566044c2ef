"""The shipped scheduler core with an executor, on a virtual clock.

    add ─► core   core.schedule ─► [ executor: one step after the other, cost.step_s each ] ─► core.commit

At an event the virtual server does what the engine does: up to `max_in_flight` plans are in flight, a result is
committed before the next plan is made, and that plan is made before a client can react to the result. Requests end by
their number of tokens; no tokens are sampled.

While all sequences decode and no request arrives or ends, many steps are taken at once (`leap`); this gives the same
states in less time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from planning.cost import CostModel, step_costs
from planning.series import Series
from planning.server import Server
from scheduler.core import Events, Request, StepResult, leap
from scheduler.core.inspect.step_load import LoadTracker, StepLoad
from scheduler.engine.plan_timing import Arrivals, could_join, lead_s

_MIN_LEAP = 3
"""Minimum number of steps of a leap; for fewer it costs more than it saves."""


class Observer(Protocol):
    """Receives what a virtual server has done."""

    def stepped(self, now_s: float, started_s: float, load: StepLoad) -> None:
        """Called when a step has ended, before it is committed."""

    def committed(self, now_s: float, planned_s: float, events: Events, *, has_first_tokens: bool) -> None:
        """Called when a step was committed in which sequences started, ended or had their first token."""

    def leapt(
        self, now_s: float, started_s: float, num_steps: int, num_decodes: int, num_free_blocks_before: int
    ) -> None:
        """Called when several steps of the same sequences were taken at once, from `started_s` to now."""


@dataclass(slots=True)
class _Flight:
    """A plan in flight."""

    step_id: int
    planned_s: float
    done_s: float
    load: StepLoad
    has_first_tokens: bool


class VirtualServer:
    """One scheduler core and its executor. `now_s` is the time of the last event."""

    def __init__(
        self, server: Server, cost: CostModel, observer: Observer, *, has_shared_prefixes: bool, leaps: bool = True
    ) -> None:
        self.scheduler = server.scheduler(has_shared_prefixes=has_shared_prefixes)
        self.scheduler.set_costs(step_costs(cost))
        self.now_s = 0.0
        self._cost = cost
        self._observer = observer
        self._leaps = leaps
        self._tells_time = server.batching.timeout_s > 0
        self._loads = LoadTracker()
        self._in_flight: deque[_Flight] = deque()
        self._max_in_flight = server.limits.max_in_flight
        self._done_s = 0.0  # end of the last step that was committed
        self._free_s = 0.0  # end of the last step that was sent
        self._seen = Arrivals()
        self._has_no_plan = True  # until a request arrives or a result is committed
        self._zeros: list[int] = []

    def add(self, request: Request, now_s: float) -> None:
        """Adds a request. Raises CapacityExceeded and QueueFull."""
        self.now_s = now_s
        self._seen.add(now_s)
        self._has_no_plan = False
        self.scheduler.add(request, now_s)

    def advance(self, until_s: float, leap_until_s: Callable[[], float]) -> bool:
        """Processes the next event if it is not after `until_s`; returns False if there is none.

        `leap_until_s` returns the time up to which steps can be taken at once: a request may arrive there.
        """
        done_s = self._in_flight[0].done_s if self._in_flight else inf
        if len(self._in_flight) < self._max_in_flight and (due_s := self._due_s()) <= min(until_s, done_s):
            self.now_s = max(self.now_s, due_s)
            if self._tells_time:
                self.scheduler.expire(self.now_s)
            if self._send_plan():
                return True
            self._has_no_plan = True
        if self._tells_time and self._wake(min(until_s, done_s)):
            return True
        if done_s <= until_s and self._in_flight:
            self._commit()
            if self._leaps and self._loads.num_decodes and len(self._in_flight) == self._max_in_flight - 1:
                self._leap(leap_until_s())  # a request that ended may add an arrival
            return True
        return False

    @property
    def next_s(self) -> float:
        """The time of the next event if no request arrives; infinite if there is none."""
        next_s = self._in_flight[0].done_s if self._in_flight else inf
        if not self._has_no_plan and len(self._in_flight) < self._max_in_flight:
            next_s = min(next_s, max(self.now_s, self._due_s()))
        if self._tells_time and (due_s := self.scheduler.next_wake_s) is not None:
            next_s = min(next_s, max(self.now_s, due_s))
        return next_s

    @property
    def busy_until_s(self) -> float:
        """The end of the last step that was sent; in the past if the executor is idle."""
        return self._free_s

    @property
    def num_planned_prompt_tokens(self) -> int:
        """The number of prompt tokens in the plans in flight."""
        return sum(flight.load.num_prefill_tokens for flight in self._in_flight)

    def _wake(self, next_s: float) -> bool:
        """Advances the clock of the core if a timeout, such as that of a dynamic batch, is the next event.

        Returns False if another event comes first.
        """
        due_s = self.scheduler.next_wake_s
        if due_s is None or due_s >= next_s:
            return False
        self.now_s = max(self.now_s, due_s)
        self.scheduler.expire(self.now_s)
        self._has_no_plan = False
        return True

    # --- steps ------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        """Returns the time at which the engine makes its next plan (see scheduler/engine/plan_timing.py)."""
        if not self._in_flight or not could_join(self.scheduler):
            return self.now_s
        newest = self._in_flight[-1]
        step_s = self._cost.step_s(newest.load)
        is_delayed = self._seen.are_likely(self.now_s, step_s - lead_s(step_s), step_s)
        return newest.done_s - lead_s(step_s) if is_delayed else self.now_s

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
        self._has_no_plan = False
        self._observer.stepped(self.now_s, started_s, flight.load)
        events = self.scheduler.commit(StepResult(1, flight.step_id, self._zeros[:num_sampled]))
        if events.started or flight.has_first_tokens or events.finished:
            self._observer.committed(self.now_s, flight.planned_s, events, has_first_tokens=flight.has_first_tokens)

    # --- leaps ------------------------------------------------------------------------------------------------

    def _leap(self, until_s: float) -> None:
        """Schedules and commits many steps at once: until `until_s`, or as many as the core allows.

        now          T1           T2           T3
         │ in flight │ planned 1  │ planned 2  │ planned 3       max_in_flight 2: three pairs of schedule and commit
         └ plan 1    └ 1 in, 2    └ 2 in, 3    └ 3 in            end at T3; the third plan is then in flight
        """
        num_in_flight = len(self._in_flight)
        num_decodes = self._loads.num_decodes
        num_seated = self.scheduler.state.limits.max_num_seqs - self.scheduler.state.batch.num_free_slots
        if not num_decodes == self._loads.num_slots == num_seated:
            return  # a sequence computes its prompt, or has started or ended and is not in a plan yet
        if any(step.releases for step in self.scheduler.state.in_flight):
            return  # blocks of an ended sequence are released at once, and not evenly during a leap
        free_s = max(self.now_s, self._free_s)
        if until_s < free_s:
            return
        steps_s = self._next_decodes_s()
        max_steps = num_in_flight + steps_s.num_terms_within(until_s - free_s)
        if max_steps < _MIN_LEAP:
            return
        started_s, num_free_blocks = self.now_s, self.scheduler.state.cache.pool.num_free_blocks
        num_steps = leap(self.scheduler, max_steps)
        if num_steps > 0:
            self._after_leap(num_steps, num_in_flight, free_s, steps_s)
            self._observer.leapt(self.now_s, started_s, num_steps, num_decodes, num_free_blocks)

    def _next_decodes_s(self) -> Series:
        """Returns the durations of the next steps in which all sequences decode."""
        num_decodes, context = self._loads.num_decodes, self._loads.num_decode_context
        first_s, second_s = (
            self._cost.step_s(StepLoad(num_decodes, context + i * num_decodes, num_sampled=num_decodes)) for i in (1, 2)
        )
        return Series(first_s, second_s - first_s)

    def _after_leap(self, num_steps: int, num_in_flight: int, free_s: float, steps_s: Series) -> None:
        """Sets clock and flights to the state after num_steps pairs of schedule and commit."""
        loads = self._loads
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
