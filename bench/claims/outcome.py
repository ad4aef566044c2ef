"""The outcomes of a run of claims, kept in results.json with the machine that they were measured on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.claims.claim import Claim, Data, Verdict, Word
from bench.report import save

FILE_NAME = "results.json"


class ResultsError(Exception):
    """The file is not a results.json of this command."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one claim: data, a failure, or the reason why it is missing.

    seconds  duration of the measurement
    date     end of the measurement, UTC
    """

    seconds: float
    date: str
    data: Data | None = None
    failure: str | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """All outcomes by the claim's name, with the conditions that all of them were measured under.

    machine  the machine, with the date of the last run
    flags    flags of the services, in addition to those that a claim sets
    """

    machine: Mapping[str, Any]
    model: str
    seed: int
    is_quick: bool
    flags: Mapping[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def has_conditions_of(self, other: "Results") -> bool:
        """Returns whether two runs had the same conditions, so that their outcomes can be in one report."""
        return self._conditions() == other._conditions()

    def _conditions(self) -> tuple[object, ...]:
        machine = {name: value for name, value in self.machine.items() if name != "date"}
        return machine, self.model, self.seed, self.is_quick, self.flags

    def verdict(self, claim: Claim) -> Verdict:
        """Returns the verdict on a claim, even if it failed or was not measured."""
        outcome = self.outcomes.get(claim.name)
        if outcome is None:
            return Verdict(Word.NOT_MEASURED, "–", "The run ended before this claim, or left it out.")
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
    """Reads a results.json. Raises ResultsError and OSError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        outcomes = {name: Outcome(**outcome) for name, outcome in values.pop("outcomes").items()}
        return Results(**values, outcomes=outcomes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ResultsError(f"{path} is not a {FILE_NAME} of quire bench claims: {error}") from None
