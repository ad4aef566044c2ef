"""Arithmetic series: the durations of steps in which the same sequences decode."""

from dataclasses import dataclass
from math import inf, sqrt

_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class Series:
    """The arithmetic series first, first + growth, first + 2 growth, …"""

    first: float
    growth: float

    def total(self, num_terms: int) -> float:
        """Returns the sum of the first num_terms terms."""
        return num_terms * self.first + self.growth * (num_terms * (num_terms - 1) / 2)

    def num_terms_within(self, budget: float) -> int:
        """Returns the maximum number of terms whose sum is at most the budget; 2 ** 30 if the budget is infinite."""
        if budget == inf:
            return _UNBOUNDED
        if budget < self.first:
            return 0
        half = self.first - self.growth / 2
        if self.growth <= 0:
            number = budget / half
        else:
            number = (sqrt(half * half + 2 * self.growth * budget) - half) / self.growth
        num_terms = int(number) + 1
        while num_terms and self.total(num_terms) > budget:
            num_terms -= 1
        return num_terms
