"""Targets name existing phases and cases, and outcomes are counted correctly."""

from itertools import chain, takewhile

import pytest

from bench.gpu.check import gpu_phases
from bench.gpu.targets import TARGETS, outcomes, render_table, targets_for
from bench.kernels.grid import gpu_cases
from tests.support.paths import ROOT

H100 = TARGETS["H100"]


def test_every_target_names_an_existing_phase_and_case() -> None:
    phases = {phase.name for phase in gpu_phases()}
    cases = {case.name: case for case in gpu_cases()}
    for target in chain.from_iterable(TARGETS.values()):
        assert target.path[0] in phases
        assert target.divide_by is None or target.divide_by[0] in phases
        if target.path[0] == "kernels":
            case = cases[target.path[2]]
            assert target.path[3] == "us" or (target.path[3] == "tflops") == bool(case.num_flops)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", None),
        ("AMD EPYC", None),
    ],
)
def test_targets_are_chosen_by_the_name_of_the_device(device: str, expected: str | None) -> None:
    assert targets_for(device) == (() if expected is None else TARGETS[expected])


def test_targets_of_an_h200_are_at_least_as_high() -> None:
    for slow, fast in zip(TARGETS["H100"], TARGETS["H200"], strict=True):
        assert (fast.what, fast.path, fast.divide_by) == (slow.what, slow.path, slow.divide_by)
        assert fast.wanted <= slow.wanted if fast.at_most else fast.wanted >= slow.wanted
        assert fast.anchor != slow.anchor
    given = {target.what: target.wanted for target in TARGETS["H200"]}
    assert given["decode attention, D128, 4 heads per kv head, b=64, 4k"] == 3.8
    assert given["8B, b=1, time per output token"] == 4.6
    assert given["8B, b=64, 1k, one step"] == 7.4


def test_case_names_are_unique() -> None:
    names = [case.name for case in gpu_cases()]
    assert len(names) == len(set(names))


RESULTS = {
    "kernels": {
        "rows": [
            {"operation": "attention_decode", "label": "D128 b=64 4096", "us": 1.0, "gb_per_s": 2800.0},
            {"operation": "attention_decode", "label": "D128 b=1 1024", "us": 15.5, "gb_per_s": 100.0},
            {"operation": "attention_decode", "label": "D128 b=1 16384", "us": None, "gb_per_s": None},
        ]
    },
    "end_to_end llama-3.1-8b": {
        "single": {"tpot_ms": 6.5},
        "batch": {"step": {"idle_ratio": 0.06, "period_ms": None}},
        "closed_loop": {"output_tokens_per_s": 5000.0},
    },
    "transformers llama-3.1-8b": {"static": {"output_tokens_per_s": 400.0}, "continuous": {"error": "no memory"}},
}


def test_outcomes_find_the_figures_of_a_report() -> None:
    found = {outcome.target.what: outcome for outcome in outcomes(H100, RESULTS)}
    reached = {what: outcome.reached for what, outcome in found.items() if outcome.reached is not None}
    assert reached == pytest.approx(
        {
            "decode attention, D128, 4 heads per kv head, b=64, 4k": 2.8,
            "same, b=1, 1k, in a graph": 15.5,
            "8B, b=1, time per output token": 6.5,
            "8B, device idle between decode steps": 6.0,
            "8B, 64 clients, to transformers generate, static": 12.5,
        }
    )
    met = {what: outcome.is_met for what, outcome in found.items() if outcome.is_met is not None}
    assert list(met.values()) == [True, False, True, False, True]
    assert render_table("NVIDIA H100", list(found.values())).row_count == len(H100)


def test_outcomes_say_which_figures_are_of_a_partial_phase() -> None:
    found = outcomes(H100, RESULTS, {"transformers llama-3.1-8b"})
    assert {outcome.target.what for outcome in found if outcome.is_partial} == {
        "8B, 64 clients, to transformers generate, static",
        "8B, 64 clients, to its continuous batching",
    }


def test_targets_without_results_are_undecided() -> None:
    assert {outcome.is_met for outcome in outcomes(H100, {})} == {None}


@pytest.mark.parametrize("device", TARGETS)
def test_page_has_the_targets(device: str) -> None:
    """Looks in the column of the device; ratios to transformers share a row."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = takewhile(lambda line: line.startswith("|"), page[page.index("| what | H100 |") :].splitlines())
    rows = [line.split("|") for line in table]
    column = rows[0].index(f" {device} ")
    figures = [row[column].strip() for row in rows[2:]]
    wanted = [
        f"{'≤' if target.at_most else '≥'} {target.wanted:g} {target.unit.partition('/layer')[0]}"
        for target in TARGETS[device]
        if target.divide_by is None
    ]
    assert figures[:-1] == wanted
    assert {target.wanted for target in TARGETS[device] if target.divide_by is not None} == {10, 2}
