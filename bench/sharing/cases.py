"""The cases of `bench sharing`, with the lengths of two data sets (planning/lengths.py).

Prompts are text that the model itself samples anew for each request: on random tokens, beams would branch
in ways that no real text causes.
"""

from dataclasses import dataclass
from enum import StrEnum

from planning.lengths import ALPACA, SHAREGPT, Lengths


class Mode(StrEnum):
    """The origin of the sequences that may share blocks."""

    SAMPLES = "samples"
    BEAMS = "beams"
    SYSTEM_PROMPT = "system prompt"


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: requests of `num_sharers` sequences (samples, beams), or `num_sharers` requests behind one
    system prompt.
    """

    mode: Mode
    lengths: Lengths
    num_sharers: int


def all_cases(numbers: tuple[int, ...]) -> list[Case]:
    """Returns samples and beams for both kinds of lengths, and the system prompt, for each number of sharers."""
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
"""Ratio of blocks saved, from 2 to 6 sequences (Kwon et al., SOSP 2023, section 6.3, figure 15; OPT-13B): "the number
of blocks we saved by sharing divided by the number of total blocks without sharing". Counted here in the same way. For
shared prefixes the paper reports throughput only."""
