"""The report as one HTML file that refers to nothing outside itself."""

import re
from collections.abc import Sequence
from html import escape

from bench.claims.claim import Claim, Plot, Table, Word
from bench.claims.drawing import inline_svg
from bench.claims.outcome import Results
from bench.claims.words import INTRODUCTION, QUICK_WARNING, conditions_of, described_machine

_STYLE = """
:root { color-scheme: light dark; --ground: #fdfdfc; --ink: #1f2328; --soft: #626a73; --line: #d9dde2;
  --good: #1b7f4d; --fair: #9a5b00; --bad: #b3263a; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --ink: #e4e7ea; --soft: #9aa3ad; --line: #343a41;
  --good: #4fc38a; --fair: #e3a84a; --bad: #f0808e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 5rem; max-width: 60rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 3.2rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
p { margin: .5rem 0; }
a { color: inherit; }
.soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
.warning { border: 1px solid var(--fair); border-radius: 6px; padding: .6rem .9rem; }
.word { font-weight: 600; white-space: nowrap; }
.reproduced { color: var(--good); } .partly { color: var(--fair); } .not, .failed { color: var(--bad); }
.missing { color: var(--soft); }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: 0 0 .4rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
table.figures th:not(:first-child), table.figures td:not(:first-child) { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: 7rem 1fr; gap: .35rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
table.figures td:first-child { min-width: 9rem; }
figure { margin: 1.2rem 0; }
figure .plot { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 34rem; height: auto; }
@media (max-width: 40rem) {
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; }
  table.claims, table.claims tbody, table.claims tr, table.claims td { display: block; width: 100%; }
  table.claims thead { display: none; } table.claims td { border: 0; padding: .1rem 0; }
  table.claims tr { border-bottom: 1px solid var(--line); padding: .6rem 0; }
}
"""

_CODE = re.compile("`([^`]+)`")
_SIGNS = re.compile(r"(?<=\d) ([%×])")
_CLASSES = {
    Word.REPRODUCED: "reproduced",
    Word.PARTLY: "partly",
    Word.NOT_REPRODUCED: "not",
    Word.FAILED: "failed",
    Word.NOT_MEASURED: "missing",
}


def render_page(results: Results, claims: Sequence[Claim]) -> str:
    """Renders all claims in one table, then a section for each."""
    sections = "\n".join(_section(results, claim) for claim in claims)
    warning = f'<p class="warning">{escape(QUICK_WARNING)}</p>' if results.is_quick else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quire: the claims, measured</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>The claims of PagedAttention and continuous batching, measured</h1>
<p>{_prose(INTRODUCTION)}</p>
{warning}
<p class="soft">{escape(described_machine(results))}</p>
{_summary(results, claims)}
{sections}
</body>
</html>
"""


def _summary(results: Results, claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        verdict = results.verdict(claim)
        rows.append(
            f'<tr><td><a href="#{escape(claim.name)}">{escape(claim.title)}</a></td><td>{_prose(claim.figure)}</td>'
            f"<td>{_prose(verdict.ours)}</td><td>{_word(verdict.word)}</td></tr>"
        )
    headings = "".join(f"<th>{heading}</th>" for heading in ("claim", "claimed", "here", "verdict"))
    body = "\n".join(rows)
    return f'<table class="claims"><thead><tr>{headings}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _section(results: Results, claim: Claim) -> str:
    verdict = results.verdict(claim)
    terms = [
        ("source", _prose(claim.source)),
        ("claimed", _prose(claim.figure)),
        ("here", _prose(verdict.ours)),
        ("conditions", _prose(conditions_of(results, claim))),
        ("verdict", f"{_word(verdict.word)}. {_prose(verdict.reason)}"),
    ]
    listed = "\n".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in terms)
    outcome = results.outcomes.get(claim.name)
    data = outcome.data if outcome else None
    plots = "\n".join(_figure(plot) for plot in claim.plots(data)) if data else ""
    tables = "\n".join(_table(table) for table in claim.tables(data)) if data else ""
    heading = f"<h2>{escape(claim.title)}</h2>"
    return f'<section id="{escape(claim.name)}">{heading}\n<dl>\n{listed}\n</dl>\n{plots}\n{tables}</section>'


def _figure(plot: Plot) -> str:
    caption = escape(plot.caption)
    return (
        f'<figure><div class="plot" role="img" aria-label="{caption}">{inline_svg(plot)}</div>'
        f"<figcaption>{_prose(plot.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table class="figures"><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{headings}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def _prose(text: str) -> str:
    """Returns a text as HTML: backticks become code, and no line breaks between a sign and its number."""
    return _SIGNS.sub("&nbsp;\\1", _CODE.sub(r"<code>\1</code>", escape(text)))


def _word(word: Word) -> str:
    return f'<span class="word {_CLASSES[word]}">{word}</span>'
