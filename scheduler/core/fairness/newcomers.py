"""Lets the prompt of a tenant that has nothing in the batch pass before a step that would take much longer (I26).

Its first token would otherwise wait for a whole step of the other tenants: for 64 decodes of them, or for the next
piece of their prompts. Instead, the next plan computes only this prompt, while the batch pauses:

    without   │ step n, running │ step n + 1: all decodes and the new prompt │ first token
    with      │ step n, running │ prompt │ first token
                                         │ step n + 1: all decodes and the newcomer's │

By the costs of steps, the prompt takes at most MAX_SHARE of the time of the step that it delays, and no plan pauses the
batch if the plan before it did. So other tenants lose at most MAX_SHARE of their service, and only if newcomers never
end. Where a step costs the same for one sequence and for many, as on a GPU that reads the weights in each, no prompt
passes. Nor does any while one tenant is alone, or costs are not known.
"""

from collections.abc import Iterable
from itertools import chain

from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import SchedulerLimits
from scheduler.core.running_batch import RunningBatch
from scheduler.core.sequence import Sequence
from scheduler.core.timing.step_costs import StepCosts

MAX_SHARE = 0.25
"""Largest part that the step of a newcomer may take of the time of the step that it delays."""


def may_pass(
    newcomer: Sequence,
    prefix: list[int],
    batch: RunningBatch,
    waiting: Iterable[Sequence],
    cache: KVCache,
    limits: SchedulerLimits,
    costs: StepCosts,
    growing: list[Sequence],
) -> bool:
    """Returns whether a sequence that can be admitted may pass before the next step.

    prefix       blocks that its prompt shares
    waiting      sequences in the queue, itself among them
    growing      decodes whose next token needs a block

    Samples that share a block, and have to copy it before they write, do not pause. Another sample that shares it could
    end during the pause. It would release the block with the plans in flight, which are committed before the copy.
    """
    if not costs.token_s or any(sequence.account is newcomer.account for sequence in batch.running):
        return False
    if any(sequence.num_planned_tokens % cache.block_size for sequence in growing):
        return False
    num_cached = len(prefix) * cache.block_size
    own_s = costs.step_s + _prompt_s(costs, newcomer, num_cached, newcomer.num_tokens - num_cached)
    others = (sequence for sequence in chain(batch.prefilling, waiting) if sequence is not newcomer)
    return own_s <= MAX_SHARE * _step_s(batch.decoding, others, limits.max_num_batched_tokens, costs)


def _step_s(decoding: list[Sequence], prompts: Iterable[Sequence], num_tokens: int, costs: StepCosts) -> float:
    """Returns the expected time of a step of up to `num_tokens` tokens: of all decodes, then of prompts in order."""
    time_s = costs.decodes_s(len(decoding), sum(sequence.num_planned_tokens for sequence in decoding))
    num_left = num_tokens - len(decoding)
    for sequence in prompts:
        if num_left <= 0:
            break
        weight = costs.report_weight if sequence.params.num_prompt_logprobs else 1
        num_taken = min(sequence.num_uncomputed_tokens, -(-num_left // weight))
        time_s += _prompt_s(costs, sequence, sequence.num_planned_tokens, num_taken)
        num_left -= num_taken * weight
    return time_s


def _prompt_s(costs: StepCosts, sequence: Sequence, num_before: int, num_tokens: int) -> float:
    return costs.prompt_s(num_tokens, num_before, is_reported=sequence.params.num_prompt_logprobs > 0)
