"""Distributions of the lengths of prompts and outputs.

Alpaca-like and ShareGPT-like lengths are log-normal. Their means are those that Kwon et al. (SOSP 2023, figure 11) give
for requests made from the two data sets. The spread and the bounds are our choice, since the paper shows them only as
histograms.
"""

import math
import random
from dataclasses import dataclass
from typing import Protocol

MAX_TOKENS = 10_000_000
"""Most tokens of a prompt, and of an output. Each token of a simulated prompt is an object of its own."""


class LengthSource(Protocol):
    def draw(self, rng: random.Random, max_model_len: int) -> tuple[int, int]:
        """Returns the numbers of prompt and output tokens of one request, together at most max_model_len."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths in tokens, like those of one data set.

    sigma    standard deviation of the logarithm
    longest  maximum of the prompt and of the output

    If the longest prompt and output together exceed the model's context, all lengths are scaled down by one factor.
    """

    name: str
    mean_prompt: float
    mean_output: float
    sigma: float
    longest: int

    def scale(self, max_model_len: int) -> float:
        """Returns the factor for all lengths; 1 if the longest prompt and the longest output fit together."""
        return min(1.0, max_model_len / (2 * self.longest))

    def draw(self, rng: random.Random, max_model_len: int) -> tuple[int, int]:
        """Returns the numbers of prompt and output tokens of one request."""
        scale = self.scale(max_model_len)
        return self._length(rng, self.mean_prompt, scale), self._length(rng, self.mean_output, scale)

    def _length(self, rng: random.Random, mean: float, scale: float) -> int:
        mu = math.log(mean) - self.sigma**2 / 2
        return max(2, math.floor(min(rng.lognormvariate(mu, self.sigma), self.longest) * scale))


ALPACA = Lengths("Alpaca-like", 19.31, 58.45, 0.7, 512)
SHAREGPT = Lengths("ShareGPT-like", 161.31, 337.99, 0.7, 1024)


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """The same lengths for every request."""

    num_prompt_tokens: int
    num_output_tokens: int

    def draw(self, rng: random.Random, max_model_len: int) -> tuple[int, int]:
        return self.num_prompt_tokens, self.num_output_tokens


LENGTHS = {"alpaca": ALPACA, "sharegpt": SHAREGPT}
