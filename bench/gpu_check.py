"""Is it right, and is it fast, on the GPU at hand: tests, kernels, both services end to end, transformers beside them.

    make gpu-check                               # or: python -m bench.gpu_check
    make gpu-check PYTHON=python3 NO_INSTALL=1   # with the packages that are there; needs the stubs (make protos)

One call, under nine minutes, compilation included. The phases are processes, one after the other, so that only one of
them holds the device's memory; each has a limit on its time. After each of them all that is known is written to
bench/results/DEVICE-DATE.json. A phase that fails or is cut off keeps what it had, and the next one runs.

Without a GPU it says so, and runs the same phases in small: models of two layers on the CPU, and those tests of the
GPU's kernels that take seconds in Triton's interpreter. That checks this harness and measures nothing.

Exits with status 1 where the tests did not pass, whatever else happened.
"""

import argparse
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

from bench import kernels, targets
from bench.machine import describe_machine, slug
from bench.phases import OUTPUT, Phase, run_phase
from bench.report import save

BUDGET_S = 520.0
_RESULTS = Path(__file__).resolve().parent / "results"
_INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def gpu_phases() -> list[Phase]:
    """By importance. Limits are generous, and add up to more than there is: the last ones get what is left."""
    return [
        _correctness("cuda", 170.0),
        _end_to_end("llama-3.1-8b", "cuda", 110.0),
        _kernels("cuda", 100.0),
        _end_to_end("qwen3-0.6b", "cuda", 90.0),
        _transformers("qwen3-0.6b", "cuda", 110.0),
        _transformers("llama-3.1-8b", "cuda", 150.0),
    ]


def small_phases() -> list[Phase]:
    """The same on the CPU, in small."""
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
    """All phases within the budget. `keep` is given the whole report after each.

    "is_correct" says whether the vital ones have passed; None: there was none among them.
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
    """How the phases went, the table of kernels, and the targets."""
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
    """What the phases measured, by their names."""
    return {name: phase["results"] for name, phase in report["phases"].items() if phase["results"]}


def _correctness(device: str, limit_s: float, environment: dict[str, str] | None = None) -> Phase:
    arguments = ("-m", "bench.correctness", "--device", device, "--json", OUTPUT)
    return Phase("correctness", arguments, limit_s, environment or {}, is_vital=True)


def _kernels(device: str, limit_s: float, *flags: str) -> Phase:
    return Phase("kernels", ("-m", "bench.kernels", "--device", device, "--json", OUTPUT, *flags), limit_s)


def _end_to_end(shape: str, device: str, limit_s: float, *flags: str) -> Phase:
    return _of_shape("end_to_end", shape, device, limit_s, flags)


def _transformers(shape: str, device: str, limit_s: float, *flags: str) -> Phase:
    return _of_shape("transformers", shape, device, limit_s, flags)


def _of_shape(kind: str, shape: str, device: str, limit_s: float, flags: tuple[str, ...]) -> Phase:
    module = {"end_to_end": "bench.end_to_end", "transformers": "bench.transformers_engines"}[kind]
    arguments = ("-m", module, "--shape", shape, "--device", device, "--json", OUTPUT, *flags)
    return Phase(f"{kind} {shape}", arguments, limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="in small on the CPU, even where there is a GPU")
    parser.add_argument("--only", default="", help="phases whose names begin with one of these, with commas between")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all phases together")
    parser.add_argument("--output", type=Path, help="default: bench/results/DEVICE-DATE.json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a phase ends with this

    console = Console(width=None if sys.stdout.isatty() else 150)
    is_small = given.small or not torch.cuda.is_available()
    if not torch.cuda.is_available():
        console.print("no GPU here: the same phases in small, on the CPU, which measures nothing")
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


if __name__ == "__main__":
    sys.exit(main())
