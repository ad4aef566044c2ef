"""What a step costs the executor: the one thing about it that the simulator has to know."""

from typing import Protocol

from scheduler.core.inspect.step_load import StepLoad


class CostModel(Protocol):
    """Affine in `num_decode_pairs` where everything else is equal: so the steps of a batch that only decodes form an
    arithmetic series, and the simulator can take many of them at once."""

    def step_s(self, load: StepLoad) -> float:
        """Seconds from one step's end to the next one's, while the executor has always another step to do."""
