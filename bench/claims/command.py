"""`quire bench claims` as a function: measures, or reads what was measured, and writes the report."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.claims.catalogue import CLAIMS
from bench.claims.claim import Claim, Setting, Word
from bench.claims.drawing import save as save_plot
from bench.claims.evidence import render_evidence
from bench.claims.outcome import FILE_NAME, Results, ResultsError, load
from bench.claims.page import render_page
from bench.claims.runner import ProgressBars, measure_all
from bench.claims.served import device_of
from bench.command import BenchError
from bench.machine import describe_machine

OUTPUT = Path("bench/results/claims")
EVIDENCE = Path("docs/evidence.md")


@dataclass(frozen=True, slots=True)
class ClaimsRun:
    """What to do.

    only      names of claims; empty: all
    output    directory of the report
    evidence  the Markdown page
    flags     of the services
    """

    model: str
    only: tuple[str, ...] = ()
    is_quick: bool = False
    seed: int = 7
    output: Path = OUTPUT
    evidence: Path = EVIDENCE
    flags: Mapping[str, Any] = field(default_factory=dict)


def measure(run: ClaimsRun, console: Console) -> bool:
    """Measures and writes the report, also when interrupted; True: no claim failed.

    With `only`, what an earlier run of the same model and kind left in the output directory is kept for the others.
    Raises BenchError, KeyboardInterrupt.
    """
    chosen = _chosen(run.only)
    results = _begun(run)
    try:
        with ProgressBars(console, len(chosen)) as bars:
            setting = Setting(run.model, run.is_quick, run.seed, run.flags)
            asyncio.run(measure_all(chosen, setting, results, bars, lambda: _kept(results, run.output)))
    finally:
        write(results, run.output, run.evidence, console)
    return not any(results.verdict(claim).word is Word.FAILED for claim in chosen)


def rewrite(source: Path, output: Path, evidence: Path, console: Console) -> None:
    """The report of a results.json that is there already. Raises BenchError."""
    try:
        results = load(source)
        write(results, output, evidence, console)
    except (ResultsError, OSError) as error:
        raise BenchError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise BenchError(f"{source} lacks what the report reads ({error!r}): measured by another version?") from error


def write(results: Results, output: Path, evidence: Path, console: Console) -> None:
    """report.html, results.json and all plots in `output`, and the page `evidence`. Raises BenchError."""
    try:
        results.save(output)
        for claim in CLAIMS:
            outcome = results.outcomes.get(claim.name)
            for plot in claim.plots(outcome.data) if outcome and outcome.data else ():
                save_plot(plot, output)
        report = output / "report.html"
        report.write_text(render_page(results, CLAIMS), encoding="utf-8")
        evidence.parent.mkdir(parents=True, exist_ok=True)
        evidence.write_text(render_evidence(results, CLAIMS, output, evidence.parent), encoding="utf-8")
    except OSError as error:
        raise BenchError(str(error)) from error
    console.print(f"written: {report}, {output / FILE_NAME}, {evidence}", soft_wrap=True)


def _chosen(names: Sequence[str]) -> list[Claim]:
    unknown = set(names) - {claim.name for claim in CLAIMS}
    if unknown:
        known = ", ".join(claim.name for claim in CLAIMS)
        raise BenchError(f"no such claim: {', '.join(sorted(unknown))}; there are {known}")
    return [claim for claim in CLAIMS if not names or claim.name in names]


def _begun(run: ClaimsRun) -> Results:
    model = Path(run.model).name
    results = Results(describe_machine(device_of(run.flags)), model, run.seed, run.is_quick)
    earlier = run.output / FILE_NAME
    if run.only and earlier.exists():
        try:
            before = load(earlier)
        except ResultsError as error:
            raise BenchError(str(error)) from error
        if (before.model, before.seed, before.is_quick) == (results.model, results.seed, results.is_quick):
            results.outcomes.update(before.outcomes)
    return results


def _kept(results: Results, output: Path) -> None:
    try:
        results.save(output)
    except OSError as error:
        raise BenchError(str(error)) from error
