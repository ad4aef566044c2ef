"""When the plan after the one that computes is made: late, so that who comes meanwhile is in it; never too late.

    begun ─────────── step n computes ────────────┬─ lead ─┐ expected end
          who arrives here is in plan n + 1       ▲        │
                                     plan n + 1 is made    plan n + 1 begins

The executor needs plan n + 1 when step n ends. Who arrives after it is made has to wait for plan n + 2: for all of step
n + 1, which with a long prompt in it may take many times as long as another. So the plan is held back until a *lead*
before the end that step n is expected to have: a quarter of its time, 10 ms at least, for the way to the executor, its
preparation, and an expectation that was wrong. Steps shorter than that are planned ahead at once.

A plan is held back for those who may come. Once somebody has, it leaves; and while all slots are taken, or so few come
that nearly all plans would be held back for nobody, none is: waking up once more in a step takes a processor from
somebody, on a CPU from the executor.
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
"""Of the time a step is expected to take."""

MIN_ARRIVALS = 0.1
"""Expected while a plan is held back; fewer are not worth it."""
_NUM_ARRIVALS = 16

_KEPT = 0.75
"""Of what older steps say, at each new one: the batch changes from step to step, and so does the machine."""


def lead_s(expected_s: float) -> float:
    """How long before the expected end of a step the next plan is made."""
    return max(MIN_LEAD_S, LEAD_SHARE * expected_s)


def could_join(core: Scheduler) -> bool:
    """Whether the next plan can gain by being made later: nobody waits, and who came could be taken in."""
    return core.num_waiting == 0 and core.state.batch.num_free_slots > 0


class Arrivals:
    """How often requests come, by the last ones. Times of one clock."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_NUM_ARRIVALS)

    def add(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def are_likely(self, now_s: float, duration_s: float) -> bool:
        """Whether it is worth waiting so long for somebody."""
        if not self._times_s:
            return False
        return len(self._times_s) * duration_s >= MIN_ARRIVALS * (now_s - self._times_s[0])


class Pace:
    """Of one plan stream: what its steps take, from those that are done. Decodes take what they took; each prompt token
    takes some time on top."""

    def __init__(self) -> None:
        self._decodes = _Mean()
        self._prompts = _Mean()
        self.arrivals = Arrivals()

    def learn(self, step: StepTrace) -> None:
        """From a step that is done."""
        busy_s, num_prompt_tokens = step.timings.busy_ns * 1e-9, step.num_tokens - step.num_decodes
        if num_prompt_tokens:
            self._prompts.add(max(0.0, busy_s - self._decodes_s(step)), num_prompt_tokens)
        elif step.num_decodes:
            self._decodes.add(busy_s, 1)

    def expected_s(self, step: StepTrace) -> float:
        """What a step will take; 0 while nothing is known."""
        return self._decodes_s(step) + (step.num_tokens - step.num_decodes) * self._prompts.value

    def held_until_s(self, core: Scheduler, traces: StepTraces) -> float | None:
        """Until when the next plan is held back, on time.monotonic(); None: it is not, or none may leave anyway."""
        if not 0 < len(traces.in_flight) < core.state.limits.max_in_flight or not could_join(core):
            return None
        expected_s = [self.expected_s(step) for step in traces.in_flight]
        hold_s, now_s = sum(expected_s) - lead_s(expected_s[-1]), time.monotonic()
        due_s = traces.begun_ns * 1e-9 + hold_s
        return due_s if due_s > now_s and self.arrivals.are_likely(now_s, hold_s) else None

    def _decodes_s(self, step: StepTrace) -> float:
        return self._decodes.value if step.num_decodes else 0.0


class _Mean:
    """Seconds a piece. Newer pieces weigh more, and so do many at once."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._number = 0.0

    def add(self, total_s: float, number: int) -> None:
        self._total_s = _KEPT * self._total_s + total_s
        self._number = _KEPT * self._number + number

    @property
    def value(self) -> float:
        return self._total_s / self._number if self._number else 0.0
