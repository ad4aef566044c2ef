"""The budget of a step: how many prompt tokens it takes, by what steps have cost.

    step without decodes   up to max_num_batched_tokens: no client waits for its next token
    step with decodes      what the target leaves          ├─ step, decodes ─┼─── prompt tokens ───┤ target
                           but at least min_prompt_tokens, so that prompts progress if decodes alone take that long

The core has no clock: the engine measures the costs, and tells the core. While it has not, only max_num_batched_tokens
bounds a step. Tokens do not depend on how prompts are divided into steps (I11), so costs change nothing but the time.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf, sqrt

from scheduler.core.limits import SchedulerLimits
from scheduler.core.sequence import Sequence

_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost of a step in seconds, as a sum. A *pair* is a token and a token that it attends to, itself included.

    step_s         of every step
    decode_s       of each sequence that decodes
    decode_pair_s  of each pair of a decode
    token_s        of each prompt token
    pair_s         of each pair of a prompt token
    report_s       of the log-probabilities of each prompt token that is reported

    0: not known, or nothing.
    """

    step_s: float = 0.0
    decode_s: float = 0.0
    decode_pair_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    report_s: float = 0.0

    def decodes_s(self, num_decodes: int, num_pairs: int) -> float:
        """Returns the time of a step without prompt tokens."""
        return self.step_s + self.decode_s * num_decodes + self.decode_pair_s * num_pairs

    def prompt_s(self, num_tokens: int, num_before: int, *, is_reported: bool) -> float:
        """Returns the time of `num_tokens` tokens of a prompt after `num_before` others."""
        token_s = self.token_s + self.report_s * is_reported
        return num_tokens * (token_s + self.pair_s * (num_before + (num_tokens + 1) / 2))

    def num_tokens_within(self, time_s: float, num_before: int, *, is_reported: bool) -> int:
        """Returns the most tokens of a prompt, after `num_before` others, that take at most `time_s`."""
        if time_s <= 0 or time_s == inf:
            return 0 if time_s <= 0 else _MOST
        # pair_s / 2 · n² + linear_s · n = time_s, solved without a division by pair_s, which may be 0
        linear_s = self.token_s + self.report_s * is_reported + self.pair_s * (num_before + 0.5)
        divisor_s = linear_s + sqrt(linear_s * linear_s + 2 * self.pair_s * time_s)
        return int(min(_MOST, 2 * time_s / divisor_s)) if divisor_s else _MOST

    @property
    def report_weight(self) -> int:
        """The number of other prompt tokens that take as long as one that is reported; 1 if the costs are not known."""
        return 1 + round(min(self.report_s / self.token_s, _MOST)) if self.token_s else 1


UNKNOWN_COSTS = StepCosts()


class StepBudget:
    """The tokens that a step may still take. Decodes are taken first, because they determine the time for prompts."""

    __slots__ = ("_costs", "_decodes", "_left_s", "_num_least", "_num_tokens", "_target_s")

    def __init__(self, limits: SchedulerLimits, costs: StepCosts) -> None:
        self._num_tokens = limits.max_num_batched_tokens
        self._num_least = limits.min_prompt_tokens
        self._target_s = limits.target_inter_token_latency_s
        self._costs = costs
        self._left_s = inf  # for prompts; infinite without decodes
        self._decodes: list[Sequence] = []  # their time is subtracted when the first prompt asks

    @property
    def is_exhausted(self) -> bool:
        return self._num_tokens <= 0 or (self._num_least <= 0 and self._time_left_s() <= 0)

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
        num_within = self._costs.num_tokens_within(
            self._time_left_s() / share, sequence.num_planned_tokens, is_reported=is_reported
        )
        return min(num_tokens, max(1, -(-self._num_least // share), min(num_worth, num_within)))

    def take_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes tokens of a prompt, before they count as planned."""
        is_reported = _is_reported(sequence)
        self._num_tokens -= num_tokens * (self._costs.report_weight if is_reported else 1)
        self._num_least -= num_tokens
        self._left_s -= self._costs.prompt_s(num_tokens, sequence.num_planned_tokens, is_reported=is_reported)

    def _time_left_s(self) -> float:
        if self._decodes:
            num_pairs = sum(sequence.num_planned_tokens for sequence in self._decodes)
            self._left_s = self._target_s - self._costs.decodes_s(len(self._decodes), num_pairs)
            self._decodes = []
        return self._left_s


def _is_reported(sequence: Sequence) -> bool:
    return sequence.params.num_prompt_logprobs > 0
