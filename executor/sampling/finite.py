"""Finds rows of logits that are not finite, so that no token is made of them.

A NaN or +inf anywhere in a row, or -inf everywhere, means that weights, KV or a kernel are broken, or that the numbers
of this sequence overflow. The sequence then ends with an error, and the others go on. Several such rows, at once or one
after the other, mean that the process is broken: it ends without a result of this step, and the scheduler computes all
sequences again on the executor that takes its place.
"""

import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor.errors import ModelBroken
from executor.plans.plan import Reports
from executor.slots.step_inputs import StepInputs

MAX_ROWS = 3
"""Rows that are not finite, within WINDOW_STEPS steps, at which the process ends. Samples that one prompt forks into
share a row, so a single request whose own numbers overflow costs one."""

WINDOW_STEPS = 1_000

_MESSAGE = "the model returned numbers that are not finite"


def finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """Returns which rows of logits[n, vocab_size] can be sampled from. The maximum of a row propagates NaN."""
    if not len(logits):
        return np.ones(0, dtype=np.bool_)
    # On the CPU, torch's maximum would start all threads for a few rows, and wait until each has a core.
    on_cpu = logits.device.type == "cpu"
    greatest = logits.float().numpy().max(axis=-1) if on_cpu else logits.amax(dim=-1).float().cpu().numpy()
    is_finite: NDArray[np.bool_] = np.isfinite(greatest)
    return is_finite


class FiniteCheck:
    """Counts the rows of one step after the other. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_steps = 0
        self._bad_steps: deque[int] = deque(maxlen=MAX_ROWS)

    def count(self, step: StepInputs, failed: NDArray[np.bool_], reports: Reports) -> None:
        """Counts a step in which failed[R] of step.sampling have no finite logits. Raises ModelBroken for too many.

        Beams count as one row, because they belong to few requests, and so do prompts.
        """
        num_bad = len(np.unique(step.sampled_logits[failed])) + num_bad_reports(reports)
        with self._lock:
            self._num_steps += 1
            self._bad_steps.extend([self._num_steps] * min(num_bad, MAX_ROWS))
            is_full = len(self._bad_steps) == MAX_ROWS
            if num_bad and is_full and self._num_steps - self._bad_steps[0] < WINDOW_STEPS:
                raise ModelBroken(f"{_MESSAGE} in {MAX_ROWS} rows within {WINDOW_STEPS:,} steps")


def num_bad_reports(reports: Reports) -> int:
    """Returns how many of the reports on beams and on prompts, at most one of each, have rows that are not finite."""
    return sum(bool(np.isnan(part.values).any()) for part in (reports.candidates, reports.prompt_logprobs) if part)
