"""Finds rows of logits that are not finite, so that no token is made of them.

A NaN or +inf anywhere in a row, or -inf everywhere, means that weights, KV or a kernel are broken, or that the numbers
of this sequence overflow. The sequence then ends. When no sequence of several steps has usable logits, the model is
broken.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor.errors import ModelBroken
from executor.slots.step_inputs import StepInputs

MAX_STEPS = 3
"""Steps in a row without a finite row, after which the executor process has to be restarted. A single step can hold a
single sequence, whose own numbers overflow."""

_MESSAGE = "the model returned numbers that are not finite"


def finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """Returns which rows of logits[n, vocab_size] can be sampled from. The maximum of a row propagates NaN."""
    if not len(logits):
        return np.ones(0, dtype=np.bool_)
    greatest = logits.amax(dim=-1).float().cpu().numpy()
    is_finite: NDArray[np.bool_] = np.isfinite(greatest)
    return is_finite


class FiniteCheck:
    """Checks the logits of one step after the other."""

    def __init__(self) -> None:
        self._num_bad_steps = 0

    def failed(self, step: StepInputs, logits: Tensor) -> NDArray[np.bool_]:
        """Returns which of step.sampling must end, for logits of step.logit_rows.

        Raises FloatingPointError for beams and prompts, whose results cannot carry an end, and ModelBroken after
        MAX_STEPS steps in a row without a finite row.
        """
        is_finite = finite_rows(logits)
        if is_finite.any():
            self._num_bad_steps = 0
        elif len(is_finite):
            self._num_bad_steps += 1
            if self._num_bad_steps >= MAX_STEPS:
                raise ModelBroken(f"{_MESSAGE} in {MAX_STEPS} steps in a row")
        if not is_finite[step.num_sampled_logits :].all():
            raise FloatingPointError(_MESSAGE)
        return ~is_finite[step.sampled_logits]
