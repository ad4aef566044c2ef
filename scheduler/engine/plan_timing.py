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
arrived. But a tenant without waiting requests can always join: its request is first in the fair queue, and displaces a
sequence of another tenant if every slot is taken. No plan is delayed if arrivals are so rare that delays cost more than
they save: each delay wakes the scheduler once more per step, and a request that can join saves the time of a step.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core import Scheduler
    from scheduler.engine.step_costs import CostEstimate
    from scheduler.engine.step_trace import StepTraces

MIN_LEAD_S = 0.010
LEAD_SHARE = 0.25
"""The lead as a share of the time that a step is expected to take."""

WAKE_S = 0.0003
"""Time that a delay costs: one more wake-up of the scheduler, and now and then a plan that comes late."""
_NUM_ARRIVALS = 16


def lead_s(expected_s: float) -> float:
    """Returns how long before the expected end of a step the next plan is made."""
    return max(MIN_LEAD_S, LEAD_SHARE * expected_s)


def could_join(core: Scheduler) -> bool:
    """Returns whether a request that arrives can join the next plan.

    It can if its tenant, one of several, has no other one waiting, or if a slot is free and no sequence is waiting.
    """
    if core.state.waiting.lacks_a_tenant():
        return True
    return core.state.batch.num_free_slots > 0 and core.num_waiting == 0


class Arrivals:
    """Estimates the rate of arrivals from the last requests. All times must come from the same clock."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_NUM_ARRIVALS)

    def add(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def are_likely(self, now_s: float, delay_s: float, saved_s: float) -> bool:
        """Returns whether requests arrive often enough to delay a plan, if each one that joins saves `saved_s`."""
        if not self._times_s:
            return False
        return len(self._times_s) * delay_s * saved_s >= WAKE_S * (now_s - self._times_s[0])


class PlanTiming:
    """Decides when to make the plans of one plan stream. `estimate` is that of the same stream."""

    def __init__(self, estimate: CostEstimate) -> None:
        self._estimate = estimate
        self.arrivals = Arrivals()

    def delayed_until_s(self, core: Scheduler, traces: StepTraces) -> float | None:
        """Returns the time (time.monotonic()) until which to delay the next plan, or None for no delay.

        Also returns None if no plan may be sent now.
        """
        if not 0 < len(traces.in_flight) < core.state.limits.max_in_flight or not could_join(core):
            return None
        expected_s = [self._estimate.expected_s(step) for step in traces.in_flight]
        delay_s, now_s = sum(expected_s) - lead_s(expected_s[-1]), time.monotonic()
        due_s = traces.begun_ns * 1e-9 + delay_s
        return due_s if due_s > now_s and self.arrivals.are_likely(now_s, delay_s, expected_s[-1]) else None
