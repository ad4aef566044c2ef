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
    others = [rag_times(name, "vllm")["gap, p99"] for name in RAG]
    assert all(own < other for own, other in zip(gaps, others, strict=True))
    assert (
        f"longer than {min(gaps) / 1e3:.2f} to {max(gaps) / 1e3:.2f} s, with vLLM "
        f"{min(others) / 1e3:.1f} to {max(others) / 1e3:.1f} s |"
    ) in README


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


def test_the_evidence_is_the_report_of_the_recorded_results() -> None:
    pytest.importorskip("matplotlib")
    from bench.claims.catalogue import CLAIMS
    from bench.claims.evidence import render_evidence
    from bench.claims.outcome import load

    recorded = ROOT / "bench" / "results" / "claims"
    report = render_evidence(load(recorded / "results.json"), CLAIMS, recorded, ROOT / "docs")
    assert (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8") == report


def test_the_readme_lists_the_ratios_of_long_prompts_in_float32() -> None:
    zen5 = results("long-prompts-zen5-cpu-vllm")["ratios"]
    emerald, zen4, avx2 = (
        results(name)["ratios"]["rag"]
        for name in ("long-prompts-emerald-cpu-vllm", "rag-logit-rows-zen4-cpu-vllm", "long-prompts-zen3-cpu-vllm")
    )
    assert (
        f"| {zen5['rag']:.2f} ({emerald:.2f} and {zen4:.2f} on two other processors, {avx2:.2f} with AVX2 alone) / "
        f"{zen5['long']:.2f} / {zen5['mixed-long']:.2f}"
    ) in README


@pytest.mark.parametrize("name", ["small-cpu-vllm", "small-bfloat16-cpu-vllm"])
def test_the_first_ratios_beside_vllm_are_those_of_the_files(name: str) -> None:
    *others, last = (f"{ratio:.2f}" for ratio in results(name)["ratios"].values())
    assert f"{', '.join(others)} and {last} " in PERFORMANCE.replace("\n", " ")


def test_the_costs_of_the_scheduler_are_those_of_the_files() -> None:
    costs = {row["running"]: row["us_a_request"] for row in results("scheduler-cost")["rows"]}
    *others, last = (f"{cost:.2f}" for cost in costs.values())
    assert f"{', '.join(others)} and {last} µs a sequence and step" in PERFORMANCE
    many = [cost for running, cost in costs.items() if running >= 64]
    assert f"| {min(many):.1f} to {max(many):.1f} µs |" in README
    clients: Any = results("shell-cost")
    for row in clients:
        shown = f"{row['num_clients']} | {row['mean_num_streams']:.0f} | {row['tokens_per_s']:,.0f}"
        assert f"| {shown} | {row['tokens_per_delta']:.2f} |" in PERFORMANCE
    assert f"about {round(clients[-1]['tokens_per_s'], -4):,.0f} tokens/s" in README


def test_what_sharing_saves_is_that_of_the_file() -> None:
    cases = results("sharing")["cases"]
    saved = [f"{100 * case['saved_ratio']:.1f}" for case in cases]
    for start in range(0, len(saved), 3):
        assert "| " + " | ".join(f"{share} %" for share in saved[start : start + 3]) + " |" in PERFORMANCE
    assert f"| {min(saved, key=float)} to {max(saved, key=float)} % (" in README


def test_the_costs_of_sampling_are_those_of_the_file() -> None:
    for cost in results("sampling-cost")["costs"]:
        assert f" | {cost['step_ms']:.2f} | {cost['sample_ms']:.2f} | " in PERFORMANCE
