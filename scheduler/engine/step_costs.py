"""Estimates what steps cost from those that are done.

The core chooses the size of the next steps by these costs, and `plan_timing` the time of the next plan.

The time of a step is taken as a sum: so many seconds for the step, and for each decode, prompt token, pair of tokens
that attend to each other, and prompt token that is reported. After each step the error of that sum is shared out among
its terms, in proportion to the squares of the step's counts, each in its unit (normalized least mean squares: Haykin,
"Adaptive Filter Theory", chapter 7). So costs that a step does not have keep their estimates, and the sum is soon right
for steps like the last ones, which the next ones are.
"""

from __future__ import annotations

from dataclasses import astuple
from operator import mul
from typing import TYPE_CHECKING

from scheduler.core import StepCosts

if TYPE_CHECKING:
    from scheduler.engine.step_trace import StepTrace

UNITS = StepCosts(step_s=1, decode_s=16, decode_pair_s=16 * 1024, token_s=128, pair_s=128 * 2048, report_s=64)
"""Counts that are about as important as one step. They decide how the time of the first steps is divided, not more."""

GAIN = 0.4
"""Part of an error that is corrected at once. Batch and speed of the machine change, and single steps vary."""

MAX_ERROR = 1.0
"""Largest error that counts, as a multiple of the expected time: single steps may be slow for reasons of their own."""

_NUM_FIRST = 8
"""Number of steps after which the costs are known well enough to doubt a measurement."""


class CostEstimate:
    """The costs of the steps of one plan stream. `costs` is all zero before the first step is measured."""

    def __init__(self) -> None:
        self._units: tuple[float, ...] = astuple(UNITS)
        self._weights = [0.0] * len(self._units)  # seconds of one unit of each count
        self._num_steps = 0
        self.costs = StepCosts()

    def learn(self, step: StepTrace) -> None:
        """Updates the costs with a completed step. An executor that does not measure its steps teaches nothing."""
        busy_s = step.timings.busy_ns * 1e-9
        if busy_s <= 0:
            return
        scaled = self._scaled(step)
        expected_s = sum(map(mul, self._weights, scaled))
        error_s = busy_s - expected_s
        if self._num_steps >= _NUM_FIRST:
            error_s = min(error_s, MAX_ERROR * expected_s)
        gain = (GAIN if self._num_steps else 1.0) * error_s / sum(map(mul, scaled, scaled))
        self._weights = [max(0.0, w + gain * x) for w, x in zip(self._weights, scaled, strict=True)]
        self._num_steps += 1
        self.costs = StepCosts(*(weight / unit for weight, unit in zip(self._weights, self._units, strict=True)))

    def expected_s(self, step: StepTrace) -> float:
        """Returns the time that a step is expected to take; 0 while nothing is known."""
        expected_s: float = sum(map(mul, self._weights, self._scaled(step)))
        return expected_s

    def _scaled(self, step: StepTrace) -> list[float]:
        """Returns the counts of a step, each in its unit."""
        counts = (
            1,
            step.num_decodes,
            step.num_decode_pairs,
            step.num_tokens - step.num_decodes,
            step.num_prefill_pairs,
            step.num_reported,
        )
        return [count / unit for count, unit in zip(counts, self._units, strict=True)]
