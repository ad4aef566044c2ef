"""Writes docs/evidence.md: the content of the HTML report, with plots as files."""

import os
from collections.abc import Sequence
from pathlib import Path

from bench.claims.claim import Claim, Table
from bench.claims.outcome import Results
from bench.claims.words import INTRODUCTION, QUICK_WARNING, conditions_of, described_machine


def render_evidence(results: Results, claims: Sequence[Claim], plots: Path, page: Path) -> str:
    """Returns Markdown for a file in the directory `page`, with the plots in the directory `plots`."""
    parts = [
        "# Evidence: the claims, measured",
        "*Which claims about paged KV memory and continuous batching hold here?*",
        "This page is written by `quire bench claims`. Do not edit it.",
        INTRODUCTION,
        *([f"**{QUICK_WARNING}**"] if results.is_quick else []),
        described_machine(results),
        _table(
            Table("", ("claim", "claimed", "here", "verdict"), tuple(_summary_row(results, claim) for claim in claims))
        ),
        *(_section(results, claim, _relative(plots, page)) for claim in claims),
    ]
    return "\n\n".join(parts) + "\n"


def _summary_row(results: Results, claim: Claim) -> tuple[str, ...]:
    verdict = results.verdict(claim)
    return (f"[{claim.title}](#{claim.name})", claim.figure, verdict.ours, f"**{verdict.word}**")


def _section(results: Results, claim: Claim, plots: str) -> str:
    verdict = results.verdict(claim)
    parts = [
        f'<a id="{claim.name}"></a>\n\n## {claim.title}',
        f"* Source: {claim.source}\n* Claimed: {claim.figure}\n* Here: {verdict.ours}\n"
        f"* Conditions: {conditions_of(results, claim)}\n* Verdict: **{verdict.word}**. {verdict.reason}",
    ]
    outcome = results.outcomes.get(claim.name)
    if outcome is not None and outcome.data is not None:
        parts += [f"![{plot.caption}]({plots}/{plot.name}.png)" for plot in claim.plots(outcome.data)]
        parts += [f"{table.caption}\n\n{_table(table)}" for table in claim.tables(outcome.data)]
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    lines = [table.headings, ("---",) * len(table.headings), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _relative(plots: Path, page: Path) -> str:
    return Path(os.path.relpath(plots.resolve(), page.resolve())).as_posix()
