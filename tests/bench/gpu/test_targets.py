"""Targets name existing phases and cases, and outcomes are counted correctly."""

import json
import os
import subprocess
import sys
import time

import pytest

from bench.commands import COMMANDS
from bench.gpu.check import gpu_phases, small_phases
from bench.gpu.correctness import counts, is_correct, pytest_arguments
from bench.gpu.random_models import SHAPES
from bench.gpu.targets import TARGETS, outcomes, render_table
from bench.kernels.grid import gpu_cases
from tests.support.paths import ROOT


def test_every_target_names_an_existing_phase_and_case() -> None:
    phases = {phase.name for phase in gpu_phases()}
    cases = {case.name: case for case in gpu_cases()}
    for target in TARGETS:
        assert target.path[0] in phases
        assert target.divide_by is None or target.divide_by[0] in phases
        if target.path[0] == "kernels":
            case = cases[target.path[2]]
            assert target.path[3] == "us" or (target.path[3] == "tflops") == bool(case.num_flops)


def test_case_names_are_unique() -> None:
    names = [case.name for case in gpu_cases()]
    assert len(names) == len(set(names))


def test_every_phase_is_a_command_of_bench() -> None:
    for small, large in zip(small_phases(), gpu_phases(), strict=True):
        assert small.arguments[:3] == large.arguments[:3]
        assert small.name.split()[0] == large.name.split()[0]
        assert small.is_vital == large.is_vital
        assert large.arguments[:2] == ("-m", "bench")
        assert large.arguments[2] in COMMANDS
        for phase in (small, large):
            assert phase.name.split()[1:] in ([], *([shape] for shape in SHAPES))
    assert [phase.name for phase in gpu_phases() if phase.is_vital] == ["correctness"]


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
    found = {outcome.target.what: outcome for outcome in outcomes(RESULTS)}
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
    assert render_table(list(found.values())).row_count == len(TARGETS)


def test_targets_without_results_are_undecided() -> None:
    assert {outcome.is_met for outcome in outcomes({})} == {None}


OUTCOMES = """\
passed tests/a.py::test_decode[128-bfloat16-0]
passed tests/a.py::test_decode[64-float16-100]
skipped tests/a.py::test_decode[float32]
failed tests/a.py::test_prefill[80-bfloat16-0]
failed tests/b.py::test_other[of two words]
passed tests/b.py::test_last
"""


def test_counts_sum_outcomes_by_dtype(tmp_path) -> None:
    path = tmp_path / "outcomes"
    path.write_text(OUTCOMES)
    assert counts(path) == {
        "passed": 3,
        "failed": 2,
        "skipped": 1,
        "passed_by_dtype": {"bfloat16": 1, "float16": 1},
        "failures": ["tests/a.py::test_prefill[80-bfloat16-0]", "tests/b.py::test_other[of two words]"],
    }


ALL_WELL = {"passed": 9, "failed": 0, "passed_by_dtype": {"float16": 4, "bfloat16": 5}}


@pytest.mark.parametrize(
    ("device", "change", "return_code", "expected"),
    [
        ("cuda", {}, 0, True),
        ("cuda", {}, 2, False),
        ("cuda", {"failed": 1}, 1, False),
        ("cuda", {"passed": 0}, 5, False),
        ("cuda", {"passed_by_dtype": {"float16": 4}}, 0, False),  # the tests did not see the GPU
        ("cpu", {"passed_by_dtype": {}}, 0, True),
    ],
)
def test_is_correct_needs_passed_tests_and_device_dtypes(
    device: str, change: dict[str, object], return_code: int, expected: bool
) -> None:
    assert is_correct(device, ALL_WELL | change, return_code) is expected


@pytest.mark.parametrize("workers", ["0", "1"])
def test_outcomes_count_after_sigterm(workers: str, tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest, time\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_passes(): pass\n"
        "def test_skips(): pytest.skip()\n"
        "def test_fails(): assert False\n"
        "def test_is_not_called(broken): pass\n"
        "def test_lasts(): pathlib.Path('begun').touch(); time.sleep(60)\n"
    )
    program = (
        "import sys; from pathlib import Path; from bench.gpu import correctness\n"
        f"own = ['-p', 'bench.gpu.outcomes', '-n', '{workers}', 'test_it.py']\n"
        f"correctness._ROOT = Path({str(tmp_path)!r})\n"
        "correctness.pytest_arguments = lambda device, outcomes: [*own, f'--outcomes={outcomes}']\n"
        "sys.exit(correctness.main(sys.argv[1:]))\n"
    )
    root = ROOT
    command = [sys.executable, "-c", program, "--device", "cpu", "--json", str(tmp_path / "counts.json")]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(root)}, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        assert process.wait(20) == 1
    finally:
        process.kill()
    found = json.loads((tmp_path / "counts.json").read_text())
    assert {name: found[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 2, "skipped": 1}


def test_kernel_tests_run_on_a_device(tmp_path) -> None:
    arguments = pytest_arguments("cuda", tmp_path / "outcomes")
    assert "tests/kernels/triton" in arguments
    ignored = [argument for argument in arguments if argument.startswith("--ignore-glob=")]
    assert [path.rpartition("_")[2] for path in ignored] == ["interpreted.py", "compiles.py"]
