"""What `quire bench sharing` asks for: requests with the lengths of two data sets, and text that the model would write.

Lengths are log-normal. Their means are those that Kwon et al. (SOSP 2023, figure 11) print for the requests that they
made of Alpaca and ShareGPT; the spread and the bounds are ours, since the paper shows them only as histograms. Where
prompt and output together can be longer than the model's context, all lengths shrink by one factor.

Prompts are text of the model's own, sampled anew for each: on random tokens beams would branch as they do on no text.
"""

import math
import random
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How the sequences that may share blocks come about."""

    SAMPLES = "samples"
    BEAMS = "beams"
    SYSTEM_PROMPT = "system prompt"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one data set, in tokens. `sigma` is of the logarithm, `longest` of prompt and output each."""

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
class Case:
    """One row of the table: requests of `num_sharers` sequences (samples, beams), or so many requests at once behind
    one system prompt.
    """

    mode: Mode
    lengths: Lengths
    num_sharers: int


def all_cases(numbers: tuple[int, ...]) -> list[Case]:
    """Samples and beams for both kinds of lengths, and the system prompt, for each number of sharers."""
    cases = [
        Case(mode, lengths, number)
        for mode in (Mode.SAMPLES, Mode.BEAMS)
        for lengths in (ALPACA, SHAREGPT)
        for number in numbers
    ]
    return cases + [Case(Mode.SYSTEM_PROMPT, ALPACA, number) for number in numbers]


PAPER: dict[tuple[Mode, str], tuple[float, float]] = {
    (Mode.SAMPLES, ALPACA.name): (0.061, 0.098),
    (Mode.BEAMS, ALPACA.name): (0.376, 0.552),
    (Mode.SAMPLES, SHAREGPT.name): (0.162, 0.305),
    (Mode.BEAMS, SHAREGPT.name): (0.443, 0.663),
}
"""Share of blocks saved, from 2 to 6 sequences (Kwon et al., SOSP 2023, section 6.3, figure 15; OPT-13B): "the number
of blocks we saved by sharing divided by the number of total blocks without sharing". Counted here in the same way. For
shared prefixes the paper reports throughput only."""
