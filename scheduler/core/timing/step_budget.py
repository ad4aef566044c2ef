"""The budget of a step: how many prompt tokens it takes, by what steps have cost.

    step without decodes   as long as MAX_PROMPT_TIME targets: no client waits for its next token, but new requests and
                           cancels wait for the step, which takes long at the end of a prompt of 100,000 tokens
    step with decodes      prompts get the time that the target leaves, but at least as much time as the decodes take,
                           and at least min_prompt_tokens if these take no longer than one more target. So they
                           progress even where decodes take as long as the target:
                           ├─ step, decodes ─┼─── prompt tokens ───┤ target

The core has no clock: the engine measures the costs, and tells the core. While it has not, only max_num_batched_tokens
bounds a step. Tokens do not depend on how prompts are divided into steps (I11), so costs change nothing but the time.
"""

from collections.abc import Sequence as SequenceOf

from scheduler.core.limits import SchedulerLimits
from scheduler.core.sequence import Sequence
from scheduler.core.timing.step_costs import StepCosts

MIN_PROMPT_TIME = 1.0
"""Least time for prompts beside decodes, in relation to that of the decodes. In simulations of a slow server with many
clients 0.5 costs 19 % of the throughput, 1.0 costs 5 %."""

MAX_PROMPT_TIME = 10.0
"""Most time for prompts in a step without decodes, in relation to the target."""


class StepBudget:
    """The tokens that a step may still take. Decodes are taken first, because they determine the time for prompts."""

    __slots__ = ("_beyond_s", "_costs", "_decodes", "_left_s", "_num_least", "_num_tokens", "_target_s")

    def __init__(self, limits: SchedulerLimits, costs: StepCosts) -> None:
        self._num_tokens = limits.max_num_batched_tokens
        self._num_least = limits.min_prompt_tokens
        self._target_s = limits.target_inter_token_latency_s
        self._costs = costs
        self._left_s = MAX_PROMPT_TIME * self._target_s  # for prompts; less with decodes
        self._beyond_s = 0.0  # for min_prompt_tokens, beside decodes
        self._decodes: list[Sequence] = []  # their time is subtracted when the first prompt asks

    @property
    def is_exhausted(self) -> bool:
        if self._num_tokens <= 0 or self._left_s <= -self._beyond_s:
            return True
        return self._num_least <= 0 and self._time_left_s() <= 0

    def take_decodes(self, sequences: SequenceOf[Sequence]) -> None:
        self._num_tokens -= len(sequences)
        self._decodes += sequences

    def room_for(self, sequence: Sequence, share: int = 1) -> int:
        """Returns how many more tokens of a prompt the step may take: what fits into 1/share of the rest.

        At least 1, unless the budget is exhausted.
        """
        if self.is_exhausted:
            return 0
        is_reported = _is_reported(sequence)
        num_tokens = -(-self._num_tokens // share)
        num_worth = num_tokens // self._costs.report_weight if is_reported else num_tokens
        left_s, num_before = self._time_left_s(), sequence.num_planned_tokens
        num_within, num_least = (
            self._costs.num_tokens_within(time_s / share, num_before, is_reported=is_reported)
            for time_s in (left_s, left_s + self._beyond_s)
        )
        num_least = min(num_least, -(-self._num_least // share))
        return min(num_tokens, max(1, num_least, min(num_worth, num_within)))

    def take_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes tokens of a prompt, before they count as planned."""
        is_reported = _is_reported(sequence)
        self._num_tokens -= num_tokens * (self._costs.report_weight if is_reported else 1)
        self._num_least -= num_tokens
        self._left_s -= self._costs.prompt_s(num_tokens, sequence.num_planned_tokens, is_reported=is_reported)

    def _time_left_s(self) -> float:
        if self._decodes:
            num_pairs = sum(sequence.num_planned_tokens for sequence in self._decodes)
            decodes_s = self._costs.decodes_s(len(self._decodes), num_pairs)
            self._left_s = max(self._target_s - decodes_s, MIN_PROMPT_TIME * decodes_s)
            self._beyond_s = self._target_s
            self._decodes = []
        return self._left_s


def _is_reported(sequence: Sequence) -> bool:
    return sequence.params.num_prompt_logprobs > 0
