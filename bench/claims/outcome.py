"""What a run of all claims came to: one outcome each, kept in results.json beside what it was measured on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.claims.claim import Claim, Data, Verdict, Word
from bench.report import save

FILE_NAME = "results.json"


class ResultsError(Exception):
    """A file that is no results.json of this command."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one claim: data, or else a failure or what was missing.

    seconds  that the measurement took
    date     when it ended, UTC
    """

    seconds: float
    date: str
    data: Data | None = None
    failure: str | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """All outcomes by the claim's name. machine, model, seed: what they were measured on and with."""

    machine: Mapping[str, Any]
    model: str
    seed: int
    is_quick: bool
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def verdict(self, claim: Claim) -> Verdict:
        """In words, of every claim: also of one that failed, or was not measured."""
        outcome = self.outcomes.get(claim.name)
        if outcome is None:
            return Verdict(Word.NOT_MEASURED, "–", "The run ended before its turn, or left it out.")
        if outcome.missing is not None:
            return Verdict(Word.NOT_MEASURED, "–", f"Not available: {outcome.missing}.")
        if outcome.data is None:
            return Verdict(Word.FAILED, "–", f"The measurement failed: {outcome.failure}")
        return claim.verdict(outcome.data)

    def save(self, directory: Path) -> Path:
        """Writes results.json. Raises OSError."""
        path = directory / FILE_NAME
        save(path, asdict(self))
        return path


def load(path: Path) -> Results:
    """Raises ResultsError, OSError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        outcomes = {name: Outcome(**outcome) for name, outcome in values.pop("outcomes").items()}
        return Results(**values, outcomes=outcomes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(f"{path} is no {FILE_NAME} of quire bench claims: {error}") from None
