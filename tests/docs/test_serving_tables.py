"""Each row of a serving table on the performance page repeats a run in bench/results, figure by figure."""

import json
import re
from collections.abc import Iterator
from functools import cache
from statistics import median
from typing import Any

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
LINKED = sorted(set(re.findall(r"\(\.\./bench/results/([\w-]+)\.json\)", PAGE)))

COLUMNS = {
    "Quire / vLLM, output tokens/s": ("quire rate", "peer rate"),
    "Quire / vLLM, tokens/s": ("quire rate", "peer rate"),
    "output tokens/s": ("quire rate", "peer rate"),
    "Quire / transformers, output tokens/s": ("ratio",),
    "Quire, tokens/s": ("quire rate",),
    "vLLM, tokens/s": ("peer rate",),
    "ratio": ("ratio",),
    "from\u2013to": ("smallest ratio", "largest ratio"),
    "TTFT p50, ms": ("quire ttft p50", "peer ttft p50"),
    "TPOT p50, ms": ("quire tpot p50", "peer tpot p50"),
    "TTFT, Quire": ("quire ttft p50", "quire ttft p99"),
    "TTFT, vLLM": ("peer ttft p50", "peer ttft p99"),
    "TTFT p50, Quire": ("quire ttft p50",),
    "TTFT p50, static batch": ("peer ttft p50",),
    "TTFT p50, s": ("quire ttft p50 s", "peer ttft p50 s"),
    "TTFT p99, s": ("quire ttft p99 s", "peer ttft p99 s"),
    "between tokens, Quire": ("quire itl p50", "quire itl p99"),
    "between tokens, vLLM": ("peer itl p50", "peer itl p99"),
    "between tokens p50, ms": ("quire itl p50", "peer itl p50"),
    "between tokens p99, ms": ("quire itl p99", "peer itl p99"),
    "executor idle": ("idle",),
    "waste": ("waste",),
}
"""The figures of a cell by the heading of its column, in their order."""


@cache
def figures(name: str) -> dict[str, dict[str, float]]:
    """Returns medians over the rounds of a file by profile or number of clients; shares in percent."""
    found: dict[str, dict[str, float]] = {}
    results = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    for label, pairs in _pairs(results).items():
        multiples = [quire["output_tokens_per_s"] / peer["output_tokens_per_s"] for quire, peer in pairs]
        known = {"ratio": median(multiples), "smallest ratio": min(multiples), "largest ratio": max(multiples)}
        for engine, runs in zip(("quire", "peer"), zip(*pairs, strict=True), strict=True):
            known[f"{engine} rate"] = median(run["output_tokens_per_s"] for run in runs)
            for time in ("ttft", "tpot", "itl"):
                for rank in ("p50", "p99"):
                    known[f"{engine} {time} {rank}"] = ms = median(run[f"{time}_ms"][rank] for run in runs)
                    known[f"{engine} {time} {rank} s"] = ms / 1e3
        if all(quire["pool"] for quire, _ in pairs):
            known["waste"] = 100 * median(quire["pool"]["mean_waste_ratio"] for quire, _ in pairs)
            known["idle"] = 100 * median(quire["executor_idle_ratio"] for quire, _ in pairs)
        found[label] = known
    return found


def _pairs(results: dict[str, Any]) -> dict[str, list[tuple[Any, Any]]]:
    """Returns the runs of Quire and of the other engine in each round. The oldest files list such pairs themselves."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    for pair in results.get("pairs", ()):
        found.setdefault(str(pair["quire"]["concurrency"]), []).append((pair["quire"], pair["peer"]))
    rounds: dict[tuple[str, int], dict[bool, Any]] = {}
    for run in results.get("runs", ()):
        label = run.get("profile") or str(run["concurrency"])
        rounds.setdefault((label, run["round"]), {})[run["engine"] == "quire"] = run
    for (label, _), by_engine in rounds.items():
        found.setdefault(label, []).append((by_engine[True], by_engine[False]))
    return found


def rows() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields label, headings and cells of each row; the halves of a table with two dtypes are two rows."""
    headings: list[str] = []
    for line in PAGE.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] in ("clients", "profile"):
            headings = cells
        elif not cells:
            headings = []
        elif headings and not cells[0].startswith("--") and set(headings) & {"ratio", "from\u2013to"}:
            starts = [i for i, heading in enumerate(headings) if "float" in heading] or [1]
            for start, stop in zip(starts, [*starts[1:], len(headings)], strict=True):
                names = [re.sub(r"^b?float\d+: ", "", heading) for heading in headings[start:stop]]
                yield cells[0].strip("`"), names, cells[start:stop]


ROWS = list(rows())


def agree(shown: list[str], wanted: list[float]) -> bool:
    """Returns True if the numbers are the wanted ones, each rounded to the digits that it shows."""
    return len(shown) == len(wanted) and all(
        abs(float(text.replace(",", "")) - value) <= 0.5 * 10 ** -len(text.partition(".")[2]) + 1e-9
        for text, value in zip(shown, wanted, strict=True)
    )


@pytest.mark.parametrize(("label", "headings", "cells"), ROWS, ids=[" ".join((row[0], *row[2][:2])) for row in ROWS])
def test_each_row_is_that_of_a_file_that_the_page_names(label: str, headings: list[str], cells: list[str]) -> None:
    shown = [number for cell in cells for number in re.findall(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?", cell)]
    known = [figures(name).get(label) for name in LINKED if name.endswith("cpu-vllm") or name == "tiny-cpu"]
    names = [figure for heading in headings for figure in COLUMNS[heading]]
    assert any(agree(shown, [of_file[name] for name in names]) for of_file in known if of_file)


def test_the_tables_are_found() -> None:
    assert len(ROWS) > 60
