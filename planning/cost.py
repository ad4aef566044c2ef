"""The cost model: the time of a step. It is all that the simulator knows about the executor."""

from typing import Protocol

from scheduler.core import StepCosts
from scheduler.core.inspect.step_load import StepLoad

_MANY_DECODES = 64
_MANY_TOKENS = 2048
_MANY_PAIRS = 1 << 20


class CostModel(Protocol):
    """Computes the time of a step from its load.

    The time must be an affine function of `num_decode_pairs` if everything else is equal. The steps of a batch that
    only decodes then form an arithmetic series, and the simulator can take many of them at once.
    """

    def step_s(self, load: StepLoad) -> float:
        """Returns the seconds from the end of one step to the end of the next, while the executor always has a plan."""


def step_costs(cost: CostModel) -> StepCosts:
    """Returns what the engine would measure: how much longer a step takes for each decode, token and pair."""
    no_tokens_s = cost.step_s(StepLoad(0, 0))

    def each_s(load: StepLoad, number: int) -> float:
        return max(0.0, cost.step_s(load) - no_tokens_s) / number

    return StepCosts(
        step_s=no_tokens_s,
        decode_s=each_s(StepLoad(_MANY_DECODES, 0, num_sampled=_MANY_DECODES), _MANY_DECODES),
        decode_pair_s=each_s(StepLoad(0, _MANY_PAIRS), _MANY_PAIRS),
        token_s=each_s(StepLoad(0, 0, 1, _MANY_TOKENS), _MANY_TOKENS),
        pair_s=each_s(StepLoad(0, 0, 0, 0, _MANY_PAIRS), _MANY_PAIRS),
    )
