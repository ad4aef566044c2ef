"""A claim: who says what, how it is measured here, what came of it, and what that means, in words.

What `measure` returns is JSON and nothing else, and everything else is a function of it: so a report can be written
again, better, without measuring anything.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from matplotlib.figure import Figure

Data: TypeAlias = dict[str, Any]
"""JSON values: what a measurement found, without any judgement."""


class NotAvailable(Exception):
    """This claim cannot be measured here; the message says what is missing."""


class Word(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    PARTLY = "partly reproduced"
    NOT_REPRODUCED = "not reproduced"
    FAILED = "failed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    """ours: our figures, in a line. reason: why the word is what it is, in sentences, with what was measured."""

    word: Word
    ours: str
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; the first column names the row."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """name: of its files. caption: what it shows, for those who do not see it too. size: inches."""

    name: str
    caption: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 4.2)


class Watch(Protocol):
    """Is told how a measurement goes on."""

    def expect(self, num_steps: int) -> None: ...

    def step(self, text: str) -> None:
        """The next of these steps begins."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What claims are measured with.

    model     directory of the checkpoint
    is_quick  in small: to see that everything works, not to learn anything
    seed      of all lengths, prompts and samples
    flags     of the services, beyond those that a claim sets itself
    """

    model: str
    is_quick: bool = False
    seed: int = 7
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """name: a word for files and for `--only`. source: where it is claimed. figure: what is claimed, with its numbers.

    measure raises NotAvailable where something is missing; whatever else it raises is a failure that the report tells.
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
    """All parts of a claim hold, or some, or none."""
    if all(holds):
        return Word.REPRODUCED
    return Word.PARTLY if any(holds) else Word.NOT_REPRODUCED


def percent(ratio: float, num_digits: int = 1) -> str:
    """0.0312 → `3.1 %`."""
    return f"{100 * ratio:.{num_digits}f} %"
