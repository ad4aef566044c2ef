"""Checks correctness and speed on the local GPU: tests, kernels, both services end to end, and transformers.

    make gpu-check                               # or: python -m bench gpu-check
    make gpu-check PYTHON=python3 NO_INSTALL=1   # uses installed packages only; needs the stubs (make protos)

It takes less than nine minutes, including compilation. The phases are processes that run one after the other, so that
only one of them holds the device's memory. Each has a time limit. After each phase all results so far are written to
bench/results/DEVICE-DATE.json. A phase that fails or is cut off keeps its partial results, and the next one runs.

Without a GPU it runs the same phases on a small scale: models of two layers on the CPU, and those tests of the GPU's
kernels that take seconds in Triton's interpreter. That checks the harness and measures nothing.

Exits with status 1 if the tests did not pass; the outcome of other phases does not matter.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.command_line import Parser, open_console
from bench.gpu import targets
from bench.gpu.phases import OUTPUT, Phase, run_phase
from bench.kernels import command as kernels
from bench.machine import describe_machine, slug
from bench.report import save

BUDGET_S = 520.0
_RESULTS = Path(__file__).resolve().parents[1] / "results"
_INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def gpu_phases() -> list[Phase]:
    """Returns the phases in order of importance.

    Their limits add up to more than the budget, so the last phases get what is left of it.
    """
    return [
        _correctness("cuda", 170.0),
        _end_to_end("llama-3.1-8b", "cuda", 110.0),
        _kernels("cuda", 100.0),
        _end_to_end("qwen3-0.6b", "cuda", 90.0),
        _transformers("qwen3-0.6b", "cuda", 110.0),
        _transformers("llama-3.1-8b", "cuda", 150.0),
    ]


def small_phases() -> list[Phase]:
    """Returns the same phases on the CPU, on a small scale."""
    return [
        _correctness("cpu", 120.0, environment=_INTERPRETED),
        _end_to_end("llama-tiny", "cpu", 60.0, "--small"),
        _kernels("cpu", 90.0, "--quick"),
        _end_to_end("qwen3-tiny", "cpu", 60.0, "--small"),
        _transformers("qwen3-tiny", "cpu", 60.0, "--small"),
        _transformers("llama-tiny", "cpu", 60.0, "--small"),
    ]


def run(
    phases: Sequence[Phase], device: torch.device, budget_s: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs all phases within the budget. `keep` takes the whole report after each.

    "is_correct" is True if all vital phases have passed, and None if there was none.
    """
    deadline_s = time.monotonic() + budget_s
    report: dict[str, Any] = {"machine": describe_machine(device), "is_correct": None, "phases": {}}
    with tempfile.TemporaryDirectory() as directory:
        for phase in phases:
            result = run_phase(phase, Path(directory) / "results.json", deadline_s)
            report["phases"][phase.name] = asdict(result)
            if phase.is_vital:
                report["is_correct"] = report["is_correct"] is not False and result.status == "passed"
            report["targets"] = [asdict(outcome) for outcome in targets.outcomes(_results(report))]
            keep(report)
    return report


def show(report: dict[str, Any], console: Console, *, has_targets: bool) -> None:
    """Prints the status of the phases, the table of kernels, and the targets."""
    results = _results(report)
    if measured := results.get("kernels"):
        console.print(kernels.render_table(measured))
    for name, phase in report["phases"].items():
        console.print(f"{name}: {phase['status']} in {phase['wall_s']:.0f} s of {phase['limit_s']:.0f}")
    if tests := results.get("correctness"):
        console.print(f"tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped")
    if has_targets:
        console.print(targets.render_table(targets.outcomes(results)))


def _results(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of the phases by name."""
    return {name: phase["results"] for name, phase in report["phases"].items() if phase["results"]}


def _phase(name: str, command: str, limit_s: float, *flags: str, **settings: Any) -> Phase:
    return Phase(name, ("-m", "bench", command, *flags, "--json", OUTPUT), limit_s, **settings)


def _correctness(device: str, limit_s: float, environment: dict[str, str] | None = None) -> Phase:
    flags = ("--device", device)
    return _phase("correctness", "gpu-correctness", limit_s, *flags, environment=environment or {}, is_vital=True)


def _kernels(device: str, limit_s: float, *flags: str) -> Phase:
    return _phase("kernels", "kernels", limit_s, "--device", device, *flags)


def _end_to_end(shape: str, device: str, limit_s: float, *flags: str) -> Phase:
    return _phase(f"end_to_end {shape}", "gpu-serving", limit_s, "--shape", shape, "--device", device, *flags)


def _transformers(shape: str, device: str, limit_s: float, *flags: str) -> Phase:
    return _phase(f"transformers {shape}", "gpu-transformers", limit_s, "--shape", shape, "--device", device, *flags)


def main(arguments: Sequence[str]) -> int:
    parser = Parser("gpu-check", __doc__)
    parser.add_argument("--small", action="store_true", help="run small phases on the CPU even if there is a GPU")
    parser.add_argument("--only", default="", help="prefixes of the names of phases, separated by commas")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all phases together")
    parser.add_argument("--output", type=Path, help="file of results (default: bench/results/DEVICE-DATE.json)")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running phase ends too

    console = open_console()
    is_small = given.small or not torch.cuda.is_available()
    if not torch.cuda.is_available():
        console.print("no GPU here: small phases run on the CPU, which checks the harness and measures nothing")
    device = torch.device("cpu" if is_small else "cuda")
    wanted = tuple(name.strip() for name in given.only.split(",") if name.strip()) or ("",)
    phases = [phase for phase in (small_phases() if is_small else gpu_phases()) if phase.name.startswith(wanted)]
    output: Path | None = given.output

    def keep(report: dict[str, Any]) -> None:
        machine = report["machine"]
        default = _RESULTS / f"{slug(machine['device'])}{'-small' if is_small else ''}-{machine['date'][:10]}.json"
        save(output or default, report)

    report = run(phases, device, given.budget_s, keep)
    show(report, console, has_targets=not is_small)
    return 1 if report["is_correct"] is False else 0
