"""Checks I25: the expected time of a step with decodes, computed from its plan and not from the state of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.inspect.step_load import LoadTracker
from scheduler.core.timing.step_budget import MAX_PROMPT_TIME, MIN_PROMPT_TIME

if TYPE_CHECKING:
    from scheduler.core import SchedulerState, Sequence, StepPlan

_ROUNDING = 1e-9


class BudgetCheck:
    """Follows the plans of one scheduler."""

    def __init__(self) -> None:
        self._loads = LoadTracker()
        self._epoch = 0

    def follow(self, state: SchedulerState, plan: StepPlan, *, is_of_newcomer: bool = False) -> bool:
        """Checks the plan that was made last; returns whether it leaves prompt tokens out because of the target.

        A plan of a newcomer that passes (I26) leaves out all prompts but its own.
        """
        if plan.epoch != self._epoch:
            self._loads, self._epoch = LoadTracker(), plan.epoch
        load, costs, limits = self._loads.follow(plan), state.costs, state.limits
        step = state.in_flight[-1]
        assert load.num_tokens == plan.num_tokens
        assert load.num_prefill_tokens == sum(step.prefills.values())
        if not load.num_prefill_tokens:
            return False
        num_weighted = load.num_tokens + load.num_reported * (costs.report_weight - 1)
        is_least, target_s = load.num_prefill_tokens <= limits.min_prompt_tokens, limits.target_inter_token_latency_s
        assert load.num_tokens <= limits.max_num_batched_tokens
        assert num_weighted < limits.max_num_batched_tokens + costs.report_weight or is_least, (
            f"I25: {num_weighted} tokens by weight, more than {limits.max_num_batched_tokens}"
        )
        decodes_s = costs.decodes_s(load.num_decodes, load.num_decode_pairs)
        prompts_s = costs.token_s * load.num_prefill_tokens + costs.pair_s * load.num_prefill_pairs
        allowed_s = max(target_s - decodes_s, MIN_PROMPT_TIME * decodes_s)
        if not load.num_decodes:
            allowed_s = MAX_PROMPT_TIME * target_s
        left_s = allowed_s - prompts_s - costs.report_s * load.num_reported
        one_s = max(_token_s(state, sequence) for sequence in step.prefills)
        beyond_s = target_s if is_least and load.num_decodes else 0.0
        assert left_s > -beyond_s - one_s - _ROUNDING, f"I25: the plan takes {-left_s} s too long"
        is_shortened = False
        for sequence in () if is_of_newcomer else state.batch.prefilling:
            if not sequence.num_uncomputed_tokens or not state.cache.num_available_blocks(sequence):
                continue
            weight = costs.report_weight if sequence.params.num_prompt_logprobs else 1
            is_full = num_weighted + weight > limits.max_num_batched_tokens
            token_s = _token_s(state, sequence)
            is_long = left_s < token_s + _ROUNDING
            assert is_full or is_long, f"I25: {sequence!r} could compute more tokens in this step"
            is_enough = (
                not load.num_decodes
                or load.num_prefill_tokens >= limits.min_prompt_tokens
                or left_s + target_s < token_s + _ROUNDING
            )
            assert is_full or is_enough, f"I25: {load.num_prefill_tokens} prompt tokens, and {sequence!r} has more"
            is_shortened |= not is_full
        return is_shortened


def _token_s(state: SchedulerState, sequence: Sequence) -> float:
    """Returns the time of one more token of a prompt."""
    is_reported = sequence.params.num_prompt_logprobs > 0
    return state.costs.prompt_s(1, sequence.num_planned_tokens, is_reported=is_reported)
