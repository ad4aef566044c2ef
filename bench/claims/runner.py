"""Measures one claim after the other. Results are written after each, so that an interruption does not lose them."""

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.claims.claim import Claim, Data, Setting
from bench.claims.drawing import inline_svg
from bench.claims.outcome import Outcome, Results

_MAX_FAILURE_LENGTH = 600


class ProgressBars:
    """Two progress bars: the claims, and the steps of the current claim."""

    def __init__(self, console: Console, num_claims: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._claims = self._progress.add_task("claims", total=num_claims)
        self._steps: TaskID | None = None
        self._num_begun = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, claim: Claim) -> None:
        self._progress.update(self._claims, description=f"claims: {claim.name}")
        self._num_begun = 0
        self._steps = self._progress.add_task("…", total=1)

    def end(self, line: str) -> None:
        if self._steps is not None:
            self._progress.remove_task(self._steps)
        self._progress.advance(self._claims)
        self._progress.console.print(line, highlight=False, markup=False)

    def expect(self, num_steps: int) -> None:
        if self._steps is not None:
            self._progress.update(self._steps, total=num_steps)

    def step(self, text: str) -> None:
        if self._steps is not None:
            self._progress.update(self._steps, description=text, completed=self._num_begun)
        self._num_begun += 1


async def measure_all(
    claims: Sequence[Claim], setting: Setting, results: Results, bars: ProgressBars, keep: Callable[[], None]
) -> None:
    """Adds an outcome to `results` for each claim, and calls `keep` after each claim."""
    for claim in claims:
        bars.begin(claim)
        started_s = time.monotonic()
        results.outcomes[claim.name] = await _outcome(claim, setting, bars, started_s)
        keep()
        verdict = results.verdict(claim)
        bars.end(f"{claim.title}: {verdict.word}; {verdict.ours} ({time.monotonic() - started_s:.0f} s)")


async def _outcome(claim: Claim, setting: Setting, bars: ProgressBars, started_s: float) -> Outcome:
    """Measures one claim. An error becomes its outcome, so that the other claims are measured."""
    data = failure = missing = None
    try:
        found = json.loads(json.dumps(await claim.measure(setting, bars)))  # as loading the file returns it
        _present(claim, found)
        data = found
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed"
    except Exception as error:  # noqa: BLE001
        failure = f"{type(error).__name__}: {error}"[:_MAX_FAILURE_LENGTH]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Outcome(round(time.monotonic() - started_s, 1), date, data, failure, missing)


def _present(claim: Claim, data: Data) -> None:
    """Renders everything that the report needs, so that unusable data fails here and not in the report."""
    claim.verdict(data)
    claim.conditions(data)
    claim.tables(data)
    for plot in claim.plots(data):
        inline_svg(plot)
