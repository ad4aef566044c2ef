"""A claim: its source, its measurement, and functions that turn the results into a report.

`measure` returns JSON values, and everything else is a function of them. So a report can be written again without
measuring.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from matplotlib.figure import Figure

Data: TypeAlias = dict[str, Any]
"""JSON values: the results of a measurement, without a judgement."""


class Word(StrEnum):
    """The verdict on a claim in one word."""

    REPRODUCED = "reproduced"
    PARTLY = "partly reproduced"
    NOT_REPRODUCED = "not reproduced"
    FAILED = "failed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict.

    ours    our figures in one line
    reason  full sentences that justify the word, with measured figures
    """

    word: Word
    ours: str
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report. Cells are text; the first column names the row."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the report.

    name     name of its file
    caption  description, also for readers who cannot see the plot
    size     width and height in inches
    """

    name: str
    caption: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 4.2)


class Watch(Protocol):
    """Receives the progress of a measurement."""

    def expect(self, num_steps: int) -> None: ...

    def step(self, text: str) -> None:
        """Called when the next step begins."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a measurement.

    model     directory of the checkpoint
    is_quick  a small run, to see that everything works
    seed      seed of all lengths, prompts and samples
    flags     flags of the services, in addition to those that a claim sets
    """

    model: str
    is_quick: bool = False
    seed: int = 7
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about paged KV memory or continuous batching.

    name    word for files and for `--only`
    source  publication of the claim
    figure  the claim in numbers

    `measure` raises ModuleNotFoundError if a package is missing. The report shows any other error as a failure.
    """

    name: str
    title: str
    source: str
    figure: str
    measure: Callable[[Setting, Watch], Awaitable[Data]]
    conditions: Callable[[Data], str]
    verdict: Callable[[Data], Verdict]
    tables: Callable[[Data], Sequence[Table]]
    plots: Callable[[Data], Sequence[Plot]]


def judged(holds: Sequence[bool]) -> Word:
    """Returns the word for a claim, given which of its parts hold."""
    if all(holds):
        return Word.REPRODUCED
    return Word.PARTLY if any(holds) else Word.NOT_REPRODUCED


def percent(ratio: float, num_digits: int = 1) -> str:
    """Formats 0.0312 as `3.1 %`."""
    return f"{100 * ratio:.{num_digits}f} %"
