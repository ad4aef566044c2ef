"""Ratios and times on the pages are those of the files in bench/results."""

import json
from statistics import median
from typing import Any

import pytest

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")

RATIOS = {
    "tiny-cpu": ("1", "4", "16", "64"),
    "small-zen5-cpu-vllm": ("1", "4", "16", "64"),
    "small-bfloat16-zen5-cpu-vllm": ("1", "4", "16", "64"),
    "small-avx2-cpu-vllm": ("1", "4", "16", "64"),
    "long-prompts-bfloat16-zen5-cpu-vllm": ("rag", "long", "mixed-long"),
    "long-prompts-matrix-rows-bfloat16-amx-cpu-vllm": ("rag", "long", "mixed-long"),
}
"""Files of paired runs, and the numbers of clients or the profiles whose ratios the README lists, in this order."""

RAG = (
    "long-prompts-bfloat16-amx-cpu-vllm",
    "long-prompts-bfloat16-emerald-cpu-vllm",
    "long-prompts-bfloat16-zen5-cpu-vllm",
    "long-prompts-emerald-cpu-vllm",
    "long-prompts-logit-rows-bfloat16-zen4-cpu-vllm",
    "long-prompts-matrix-rows-bfloat16-amx-cpu-vllm",
    "long-prompts-zen3-cpu-vllm",
    "long-prompts-zen5-cpu-vllm",
    "rag-logit-rows-zen4-cpu-vllm",
)
"""Files from which the performance page shows the profile `rag`."""


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rag_times(name: str, engine: str) -> dict[str, float]:
    """Returns the medians over the rounds of `rag`, in milliseconds."""
    runs = [
        run
        for run in results(name)["runs"]
        if run["profile"] == "rag" and (run["engine"] == "quire") == (engine == "quire")
    ]
    return {
        "first token, p50": median(run["ttft_ms"]["p50"] for run in runs),
        "gap, p99": median(run["itl_ms"]["p99"] for run in runs),
    }


@pytest.mark.parametrize("name", RATIOS)
def test_the_readme_lists_the_ratios_and_dates_of_the_files(name: str) -> None:
    measured = results(name)
    ratios = " / ".join(f"{measured['ratios'][key]:.2f}" for key in RATIOS[name])
    (row,) = (line for line in README.split("\n") if ratios in line)
    year_and_month, _, day = measured["machine"]["date"][:10].rpartition("-")
    assert f"{year_and_month}-{day}" in row or f" and {day}," in row


def test_the_longest_gaps_beside_long_prompts_are_those_of_the_files() -> None:
    gaps = [rag_times(name, "quire")["gap, p99"] for name in RAG]
    assert f"longer than {min(gaps) / 1e3:.2f} to {max(gaps) / 1e3:.2f} s with Quire" in PERFORMANCE
    assert all(rag_times(name, "quire")["gap, p99"] < rag_times(name, "vllm")["gap, p99"] for name in RAG)


def test_the_readme_says_where_first_tokens_come_later() -> None:
    later = {
        name
        for name in RAG
        if rag_times(name, "quire")["first token, p50"] > rag_times(name, "vllm")["first token, p50"]
    }
    on_intel = {name for name in RAG if "Intel" in results(name)["machine"]["device"]}
    in_float32 = {name for name in RAG if results(name)["server"]["dtype"] == "float32"}
    assert later == on_intel | in_float32
    assert "in float32, and in bfloat16 on Intel, half of the first tokens come later than vLLM's" in README
