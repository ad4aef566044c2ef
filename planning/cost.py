"""The cost model: the time of a step. It is all that the simulator knows about the executor."""

from typing import Protocol

from scheduler.core.inspect.step_load import StepLoad


class CostModel(Protocol):
    """Computes the time of a step from its load.

    The time must be an affine function of `num_decode_pairs` if everything else is equal. The steps of a batch that
    only decodes then form an arithmetic series, and the simulator can take many of them at once.
    """

    def step_s(self, load: StepLoad) -> float:
        """Returns the seconds from the end of one step to the end of the next, while the executor always has a plan."""
