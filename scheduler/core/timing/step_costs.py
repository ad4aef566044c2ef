"""The costs of a step, as the engine has measured them. The core has no clock."""

from dataclasses import dataclass
from math import inf, sqrt

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
