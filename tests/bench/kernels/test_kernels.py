"""The kernel benchmark on a small scale: counts, structure and the timed operations; no times are checked."""

import io
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.kernels import cases as kernel_cases
from bench.kernels import ceilings, command
from bench.kernels.attention_cases import decode, mixed_contexts, prefill
from bench.kernels.cases import LARGE, Case, ModelShape
from bench.kernels.ceilings import measure_ceilings
from bench.kernels.grid import gpu_cases
from bench.kernels.layer_cases import copy, linear, norm, projection, projections, rotate, sampling, silu
from bench.machine import describe_machine, device_name, slug
from bench.stopwatch import time_rounds
from kernels import reference, select
from tests.support.paths import ROOT

CPU = torch.device("cpu")
TINY = ModelShape("tiny", 4, 2, 16, 32, 48, 100, 2)
F32 = torch.float32
CASES = [
    decode(TINY, F32, [5, 40, 1], "three"),
    prefill(TINY, F32, 20, 50, "20 of 50"),
    rotate(TINY, F32, 7),
    norm(TINY, F32, 7, adds=False),
    norm(TINY, F32, 7, adds=True),
    silu(TINY, F32, 7),
    linear(TINY, F32, 9),
    projection(TINY, F32, "head", 9),
    copy(TINY, F32, 3),
]


@pytest.fixture(autouse=True)
def _few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "_MAX_BUFFERS", 3)
    torch.set_num_threads(1)


class Counting:
    """The reference kernels, which record the names of their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(reference, name)(*arguments)

        return self._pack if name == "pack_linear" else call

    def _pack(self, weights: list[torch.Tensor]) -> Any:
        layer = reference.pack_linear(weights)

        def call(x: torch.Tensor) -> torch.Tensor:
            self.calls.append("linear")
            return layer(x)

        return call


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_makes_the_stated_number_of_calls(case: Case) -> None:
    backend: Any = Counting()
    prepared = case.prepare(backend, CPU)
    assert backend.calls == []
    prepared.run()
    assert backend.calls == [case.operation] * prepared.num_calls
    assert prepared.num_calls == 3


@pytest.mark.parametrize(
    "case", [*CASES, *(sampling(TINY, F32, 3, top_p) for top_p in (1.0, 0.9))], ids=lambda case: case.name
)
def test_cpu_kernels_run_all_cases(case: Case) -> None:
    case.prepare(select(CPU), CPU).run()


def test_bytes_and_flops_equal_counts_by_hand() -> None:
    row = 16 * 4  # head_dim float32 numbers
    by_name = {case.operation: case for case in CASES if case.label != "tiny head M=9"}
    assert by_name["attention_decode"].num_bytes == 46 * 2 * 2 * row + 2 * 3 * 4 * row
    seen = sum(range(31, 51))  # the query at position p sees p + 1 tokens
    assert by_name["attention_prefill"].num_flops == 4 * 4 * 16 * seen  # a product and a sum, for keys and for values
    assert by_name["rotate_and_store"].num_bytes == 2 * 7 * (4 + 2 + 2) * row
    assert by_name["rms_norm"].num_bytes == 2 * 7 * 32 * 4
    assert by_name["add_rms_norm"].num_bytes == 4 * 7 * 32 * 4
    assert by_name["silu_multiply"].num_bytes == 3 * 7 * 48 * 4
    assert by_name["linear"].num_bytes == (32 * 96 + 9 * (32 + 96)) * 4  # gate and up of 48 each
    assert by_name["linear"].num_flops == 2 * 9 * 32 * 96
    assert by_name["copy_blocks"].num_bytes == 2 * 3 * 2 * (2 * 2 * 16 * row)  # pairs, layers, a block


def test_buffers_together_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "_MAX_BUFFERS", 1000)
    monkeypatch.setattr(kernel_cases, "cache_bytes", lambda device: 10_000)
    case = silu(TINY, F32, 7)
    prepared = case.prepare(reference, CPU)
    assert prepared.num_calls * case.num_bytes >= 30_000 > (prepared.num_calls - 1) * case.num_bytes


def test_mixed_contexts_are_shuffled_and_reproducible() -> None:
    lengths = mixed_contexts(16, 16, 512)
    assert lengths == mixed_contexts(16, 16, 512)
    assert (min(lengths), max(lengths), len(set(lengths))) == (16, 512, 16)
    assert lengths != sorted(lengths)


@pytest.mark.timeout(300)
def test_triton_kernels_run_all_cases() -> None:
    """Runs in Triton's interpreter, in a process of its own, and compares with the reference."""
    program = (
        "import torch\n"
        "from bench.kernels import cases\n"
        "from bench.kernels.cases import is_triton\n"
        "from bench.kernels.layer_cases import greedy, sampling\n"
        "from tests.bench.kernels.test_kernels import TINY, CASES, CPU, F32\n"
        "from kernels import reference, select, triton\n"
        "cases._MAX_BUFFERS = 2\n"
        "assert is_triton(triton) and not is_triton(reference)\n"
        "attended = []\n"
        "for name in ('attend_decode', 'attend_prefill'):\n"
        "    def keep(query, kv, work, out, scale, original=getattr(triton, name)):\n"
        "        original(query, kv, work, out, scale)\n"
        "        attended.append(out.clone())\n"
        "    setattr(triton, name, keep)\n"
        "for case in [*CASES, greedy(TINY, F32, 3), sampling(TINY, F32, 3, 0.9)]:\n"
        "    torch.manual_seed(1)\n"
        "    case.prepare(triton, CPU).run()\n"
        "expected = []\n"
        "class Backend:\n"
        "    def attention_decode(self, *arguments):\n"
        "        reference.attention_decode(*arguments); expected.append(arguments[4].clone())\n"
        "    def attention_prefill(self, *arguments):\n"
        "        reference.attention_prefill(*arguments); expected.append(arguments[5].clone())\n"
        "for case in CASES[:2]:\n"
        "    torch.manual_seed(1)\n"
        "    case.prepare(Backend(), CPU).run()\n"
        "assert len(attended) == len(expected) == 4\n"
        "for a, b in zip(attended, expected):\n"
        "    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]


def test_report_has_rates_shares_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: Any, device: torch.device) -> Any:
        raise RuntimeError("does not compile")

    failing = Case("rms_norm", "broken", F32, 1, 0, "copy", broken)
    monkeypatch.setattr(command, "cpu_cases", lambda dtype, is_quick: [*CASES[:2], failing] if dtype == F32 else [])
    reports: list[dict[str, Any]] = []
    rows = command.measure(command.Settings(CPU, 0.0, True, (1,)), lambda report: reports.append(report))
    assert [row.name for row in rows] == ["attention_decode three", "attention_prefill 20 of 50", "rms_norm broken"]
    assert [len(report["rows"]) for report in reports] == [1, 2, 3]  # kept after each
    memory_bound, compute_bound, failed = rows
    assert memory_bound.tflops is None
    assert compute_bound.gb_per_s is None
    for row, rate, ceiling in (
        (memory_bound, memory_bound.gb_per_s, reports[-1]["ceilings"]["1 threads"]["read_gb_per_s"]),
        (compute_bound, compute_bound.tflops, reports[-1]["ceilings"]["1 threads"]["gemm_tflops"]["float32"]),
    ):
        assert (row.mode, row.num_threads, row.error) == ("cpu time", 1, None)
        assert row.us is not None
        assert row.us > 0
        assert row.ceiling_share == pytest.approx(rate / ceiling)
    assert memory_bound.gb_per_s == pytest.approx(CASES[0].num_bytes / memory_bound.us / 1e3)
    assert compute_bound.tflops == pytest.approx(CASES[1].num_flops / compute_bound.us / 1e6)
    assert (failed.error, failed.us, failed.ceiling_share) == ("RuntimeError: does not compile", None, None)
    console = Console(width=140, file=io.StringIO())
    console.print(command.render_table(reports[-1]))
    assert "RuntimeError" in console.file.getvalue()


def test_case_that_does_not_fit_the_memory_is_skipped_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(backend: Any, device: torch.device) -> Any:
        pytest.fail("it was prepared")

    large = Case("rms_norm", "large", F32, 2 * 10**9, 0, "copy", never)
    monkeypatch.setattr(kernel_cases, "cache_bytes", lambda device: 10**9)
    monkeypatch.setattr(command, "free_memory_bytes", lambda device: 4 * 10**9)
    monkeypatch.setattr(command, "cpu_cases", lambda dtype, is_quick: [CASES[3], large] if dtype == F32 else [])
    reports: list[dict[str, Any]] = []
    fits, skipped = command.measure(command.Settings(CPU, 0.0, True, (1,)), lambda report: reports.append(report))
    assert (fits.skipped, fits.error, skipped.error, skipped.us) == (None, None, None, None)
    assert skipped.skipped == "needs 4 GB, 4 GB are free"  # two buffers exceed three times the cache
    console = Console(width=140, file=io.StringIO())
    console.print(command.render_table(reports[-1]))
    assert "skipped" in console.file.getvalue()


def test_products_of_8b_have_the_sizes_of_its_layers() -> None:
    assert projections(LARGE) == {
        "qkv": (4096, 6144),
        "o": (4096, 4096),
        "gate_up": (4096, 28672),
        "down": (14336, 4096),
        "head": (4096, 128256),
    }
    rows = {case.label: case for case in gpu_cases() if case.operation == "linear"}
    assert list(rows) == [f"8B {name} M={rows}" for name in projections(LARGE) for rows in (1, 16, 64, 256, 2048)]
    one, many = rows["8B down M=1"], rows["8B down M=2048"]
    assert (one.num_bytes, one.num_flops, one.ceiling, one.in_graph) == (
        (14336 * 4096 + 14336 + 4096) * 2,
        0,
        "read",
        True,
    )
    assert (many.num_flops, many.ceiling, many.in_graph) == (2 * 2048 * 14336 * 4096, "gemm", False)


def test_round_is_warmed_up_and_timed_at_least_five_times() -> None:
    calls: list[int] = []
    timing = time_rounds(lambda: calls.append(1), 2, CPU, budget_s=0.0)
    assert (timing.num_rounds, len(calls)) == (5, 8)
    assert 0 < timing.best_s <= timing.median_s


def test_ceilings_cover_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "cache_bytes", lambda device: 0)
    found = measure_ceilings(CPU, (torch.float32, torch.float64), 0.0)  # of all types, the CPU is fast with these
    assert set(found.gemm_tflops) == {"float32", "float64"}
    assert min(found.copy_gb_per_s, found.read_gb_per_s, *found.gemm_tflops.values()) > 0


def test_machine_description_has_device_versions_and_date() -> None:
    described = describe_machine(CPU)
    assert described["device"] == device_name(CPU) != ""
    assert described["versions"]["torch"] == torch.__version__
    assert described["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("AMD EPYC™ (x)", "amd-epyc-x"), ("", "unknown")],
)
def test_slug_is_lower_case_with_hyphens(name: str, expected: str) -> None:
    assert slug(name) == expected
