"""How long prompts and outputs are.

Alpaca-like and ShareGPT-like lengths are log-normal. Their means are those that Kwon et al. (SOSP 2023, figure 11)
print for the requests that they made of the two data sets; the spread and the bounds are ours, since the paper shows
them only as histograms.
"""

import math
import random
from dataclasses import dataclass
from typing import Protocol


class LengthSource(Protocol):
    def draw(self, rng: random.Random, max_model_len: int) -> tuple[int, int]:
        """Prompt and output tokens of one request; together at most max_model_len."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one data set, in tokens. `sigma` is of the logarithm, `longest` of prompt and output each.

    Where prompt and output together can be longer than the model's context, all lengths shrink by one factor.
    """

    name: str
    mean_prompt: float
    mean_output: float
    sigma: float
    longest: int

    def scale(self, max_model_len: int) -> float:
        """What all lengths are multiplied by: 1 where the longest prompt and the longest output fit together."""
        return min(1.0, max_model_len / (2 * self.longest))

    def draw(self, rng: random.Random, max_model_len: int) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        scale = self.scale(max_model_len)
        return self._length(rng, self.mean_prompt, scale), self._length(rng, self.mean_output, scale)

    def _length(self, rng: random.Random, mean: float, scale: float) -> int:
        mu = math.log(mean) - self.sigma**2 / 2
        return max(2, math.floor(min(rng.lognormvariate(mu, self.sigma), self.longest) * scale))


ALPACA = Lengths("Alpaca-like", 19.31, 58.45, 0.7, 512)
SHAREGPT = Lengths("ShareGPT-like", 161.31, 337.99, 0.7, 1024)


@dataclass(frozen=True, slots=True)
class FixedLengths:
    num_prompt_tokens: int
    num_output_tokens: int

    def draw(self, rng: random.Random, max_model_len: int) -> tuple[int, int]:
        return self.num_prompt_tokens, self.num_output_tokens


LENGTHS = {"alpaca": ALPACA, "sharegpt": SHAREGPT}
