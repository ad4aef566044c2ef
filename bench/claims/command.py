"""Measures claims about paged KV memory and continuous batching; writes a report with verdicts and plots.

python -m bench claims --only batching
python -m bench claims --from bench/results/claims/results.json      # writes the report again, measures nothing
"""

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
from bench.command_line import BenchError, Parser
from bench.machine import describe_machine
from quire.model_path import resolved_model

OUTPUT = Path("bench/results/claims")
EVIDENCE = Path("docs/evidence.md")


@dataclass(frozen=True, slots=True)
class ClaimsRun:
    """A run of claims.

    only      names of claims; empty: all
    output    directory of the report
    evidence  the Markdown page
    flags     flags of the services
    """

    model: str
    only: tuple[str, ...] = ()
    is_quick: bool = False
    seed: int = 7
    output: Path = OUTPUT
    evidence: Path = EVIDENCE
    flags: Mapping[str, Any] = field(default_factory=dict)


def measure(run: ClaimsRun, console: Console) -> bool:
    """Measures and writes the report, also when it is interrupted. Returns True if no claim failed.

    With `only`, the results of the other claims are kept from an earlier run in the output directory, if its machine,
    versions, model, seed, size and flags were the same. Raises BenchError and KeyboardInterrupt.
    """
    chosen = _chosen(run.only)
    results = _begun(run, console)
    try:
        with ProgressBars(console, len(chosen)) as bars:
            setting = Setting(run.model, run.is_quick, run.seed, run.flags)
            asyncio.run(measure_all(chosen, setting, results, bars, lambda: _kept(results, run.output)))
    finally:
        write(results, run.output, run.evidence, console)
    return not any(results.verdict(claim).word is Word.FAILED for claim in chosen)


def rewrite(source: Path, output: Path, evidence: Path, console: Console) -> None:
    """Writes the report of an existing results.json. Raises BenchError."""
    try:
        results = load(source)
        write(results, output, evidence, console)
    except (ResultsError, OSError) as error:
        raise BenchError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise BenchError(f"{source} lacks what the report reads ({error!r}): measured by another version?") from error


def write(results: Results, output: Path, evidence: Path, console: Console) -> None:
    """Writes report.html, results.json and all plots to `output`, and the page `evidence`. Raises BenchError."""
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


def _begun(run: ClaimsRun, console: Console) -> Results:
    model = Path(run.model).name
    results = Results(describe_machine(device_of(run.flags)), model, run.seed, run.is_quick, dict(run.flags))
    earlier = run.output / FILE_NAME
    if run.only and earlier.exists():
        try:
            before = load(earlier)
        except ResultsError as error:
            raise BenchError(str(error)) from error
        if before.has_conditions_of(results):
            results.outcomes.update(before.outcomes)
        else:
            console.print(
                f"not kept, because its machine, versions, model, seed, size or flags were others: {earlier}",
                soft_wrap=True,
            )
    return results


def _kept(results: Results, output: Path) -> None:
    try:
        results.save(output)
    except OSError as error:
        raise BenchError(str(error)) from error


def main(arguments: Sequence[str]) -> int:
    parser = Parser("claims", __doc__)
    parser.add_argument("--only", action="append", help="name of a claim; may be repeated (default: all)")
    parser.add_argument("--quick", action="store_true", help="a small run, to see that everything works")
    parser.add_argument("--seed", type=int, default=7, help="seed of lengths, prompts and samples")
    parser.add_argument("--from", dest="source", type=Path, help="write the report of this results.json")
    parser.add_argument("--output", type=Path, help=f"directory of the report (default: {OUTPUT})")
    parser.add_argument("--evidence", type=Path, help=f"page (default: {EVIDENCE}, or evidence.md in --output)")
    parser.add_argument("--model", help="directory or hub id of the model (default: the embedded one)")
    parser.add_argument("--dtype", help="dtype of the services")
    parser.add_argument("--device", help="device of the executor")
    given = parser.parse_args(arguments)
    output = given.output or OUTPUT
    evidence = given.evidence or (output / "evidence.md" if given.output else EVIDENCE)
    console = Console()
    if given.source is not None:
        rewrite(given.source, output, evidence, console)
        return 0
    flags = {name: value for name in ("dtype", "device") if (value := getattr(given, name)) is not None}
    run = ClaimsRun(
        resolved_model(given.model), tuple(given.only or ()), given.quick, given.seed, output, evidence, flags
    )
    if not measure(run, console):
        raise BenchError("a measurement failed; the report says which, and why")
    return 0
