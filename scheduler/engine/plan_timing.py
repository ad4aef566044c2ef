"""Decides when to make the next plan while a step is computing.

    begin ─────────── step n computes ────────────┬─ lead ─┐ expected end
          requests that arrive here join n + 1    ▲        │
                                     plan n + 1 is made    plan n + 1 begins

Delays the next plan so that late arrivals can join it. The executor needs plan n + 1 when step n ends. A request that
arrives after that plan was made waits for plan n + 2, and so for all of step n + 1, which can take long if it computes
a long prompt. The plan is therefore delayed until a *lead* before the expected end of step n. The lead is a quarter of
the step's time and at least 10 ms; it covers the transfer to the executor, the preparation there, and estimation
errors. If a step is shorter than its lead, the next plan is made at once.

A plan is delayed only for requests that may still arrive and join it. If a slot is free, it is sent as soon as one has
arrived. If every slot is taken, only a tenant without waiting requests can join, by displacing a sequence of another
one. No plan is delayed if arrivals are so rare that most delays would be useless: each delay wakes the scheduler once
more per step, which takes processor time from other work, including the executor's on a CPU.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core import Scheduler
    from scheduler.engine.step_trace import StepTrace, StepTraces

MIN_LEAD_S = 0.010
LEAD_SHARE = 0.25
"""The lead as a share of the time that a step is expected to take."""

MIN_ARRIVALS = 0.1
"""Minimum expected number of arrivals during a delay that makes it worthwhile."""
_NUM_ARRIVALS = 16

_KEPT = 0.75
"""Factor applied to the weight of older steps at each new one, because batch and machine speed change."""


def lead_s(expected_s: float) -> float:
    """Returns how long before the expected end of a step the next plan is made."""
    return max(MIN_LEAD_S, LEAD_SHARE * expected_s)


def could_join(core: Scheduler) -> bool:
    """Returns whether a request that arrives can join the next plan.

    If a slot is free, it can if no sequence is waiting. If none is, it can if its tenant has no other one waiting.
    """
    if core.state.batch.num_free_slots:
        return core.num_waiting == 0
    return core.state.waiting.lacks_a_tenant()


class Arrivals:
    """Estimates the rate of arrivals from the last requests. All times must come from the same clock."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_NUM_ARRIVALS)

    def add(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def are_likely(self, now_s: float, duration_s: float) -> bool:
        """Returns whether requests arrive often enough to delay a plan for `duration_s`."""
        if not self._times_s:
            return False
        return len(self._times_s) * duration_s >= MIN_ARRIVALS * (now_s - self._times_s[0])


class PlanTiming:
    """Estimates how long the steps of one plan stream take, from the completed steps.

    The decodes of a step are expected to take as long as in recent steps; each prompt token adds a constant time.
    """

    def __init__(self) -> None:
        self._decodes = _Mean()
        self._prompts = _Mean()
        self.arrivals = Arrivals()

    def learn(self, step: StepTrace) -> None:
        """Updates the estimates with a completed step."""
        busy_s, num_prompt_tokens = step.timings.busy_ns * 1e-9, step.num_tokens - step.num_decodes
        if num_prompt_tokens:
            self._prompts.add(max(0.0, busy_s - self._decodes_s(step)), num_prompt_tokens)
        elif step.num_decodes:
            self._decodes.add(busy_s, 1)

    def expected_s(self, step: StepTrace) -> float:
        """Returns the time that a step is expected to take; 0 while nothing is known."""
        return self._decodes_s(step) + (step.num_tokens - step.num_decodes) * self._prompts.value

    def delayed_until_s(self, core: Scheduler, traces: StepTraces) -> float | None:
        """Returns the time (time.monotonic()) until which to delay the next plan, or None for no delay.

        Also returns None if no plan may be sent now.
        """
        if not 0 < len(traces.in_flight) < core.state.limits.max_in_flight or not could_join(core):
            return None
        expected_s = [self.expected_s(step) for step in traces.in_flight]
        delay_s, now_s = sum(expected_s) - lead_s(expected_s[-1]), time.monotonic()
        due_s = traces.begun_ns * 1e-9 + delay_s
        return due_s if due_s > now_s and self.arrivals.are_likely(now_s, delay_s) else None

    def _decodes_s(self, step: StepTrace) -> float:
        return self._decodes.value if step.num_decodes else 0.0


class _Mean:
    """Weighted mean of seconds per item. Newer measurements, and those of many items, weigh more."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._number = 0.0

    def add(self, total_s: float, number: int) -> None:
        self._total_s = _KEPT * self._total_s + total_s
        self._number = _KEPT * self._number + number

    @property
    def value(self) -> float:
        return self._total_s / self._number if self._number else 0.0
