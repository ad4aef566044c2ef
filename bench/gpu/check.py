"""Checks correctness and speed on the local GPU: tests, kernels, both services end to end, and transformers.

    make gpu-check                               # or: python -m bench gpu-check
    make gpu-check ARGS='--phase correctness'    # one phase or several: --phase kernels,end_to_end
    make gpu-check ARGS=--show                   # runs nothing, shows the results that are there
    make gpu-check PYTHON=python3 NO_INSTALL=1   # uses installed packages only; needs the stubs (make protos)

The phases are processes that run one after the other, so that only one of them holds the device's memory. Each takes
less than ten minutes, or is cut off. Each writes a file of its own, bench/results/DEVICE-DATE/PHASE.json, while it runs
and when it ends. So phases can run in separate calls on one day, and a phase that fails, is cut off or is killed keeps
its partial results and leaves those of the others. At the end the results of all phases in the folder are shown, with
the targets that they reached, if there are targets for the device.

Without a GPU it runs the same phases on a small scale: models of two layers on the CPU, and those tests of the GPU's
kernels that take seconds in Triton's interpreter. That checks the harness and measures nothing. Phases that need
compute-sanitizer or a second GPU are skipped where there is none.

Exits with status 1 if tests of this call did not pass; the outcome of other phases does not matter.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.command_line import Parser, open_console
from bench.gpu import targets
from bench.gpu.correctness import SANITIZERS
from bench.gpu.phases import OUTPUT, Phase, PhaseResult, run_phase
from bench.gpu.records import folder_name, load_records, save_record
from bench.kernels import command as kernels
from bench.machine import describe_machine

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_SECOND = "cuda:1"
_SMALL_LIMIT_S = 300.0  # they take seconds, but other work may share the CPU
# Also on a machine with GPUs, small phases see none.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_INTERPRETED = _NO_GPU | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def gpu_phases() -> list[Phase]:
    """Returns the phases in the order in which they run: the most important first."""
    return [
        _phase("environment", "gpu-environment", 60.0, "--device", "cuda"),
        _correctness("correctness", 540.0, "cuda"),
        _phase("kernels", "kernels", 300.0, "--device", "cuda"),
        _end_to_end("llama-3.1-8b", 300.0, "cuda"),
        _end_to_end("qwen3-0.6b", 240.0, "cuda"),
        *_sanitizers(300.0),
        _correctness("two_devices tests", 300.0, _SECOND),
        _serving("two_devices qwen3-0.6b", "qwen3-0.6b", 240.0, _SECOND),
        _transformers("qwen3-0.6b", 240.0, "cuda"),
        _transformers("llama-3.1-8b", 420.0, "cuda"),
    ]


def small_phases() -> list[Phase]:
    """Returns the same phases on the CPU, on a small scale."""
    return [
        _phase("environment", "gpu-environment", _SMALL_LIMIT_S, "--device", "cpu", environment=_NO_GPU),
        _correctness("correctness", _SMALL_LIMIT_S, "cpu", environment=_INTERPRETED),
        _phase("kernels", "kernels", _SMALL_LIMIT_S, "--device", "cpu", "--quick", environment=_NO_GPU),
        _end_to_end("llama-tiny", _SMALL_LIMIT_S, "cpu", "--small", environment=_NO_GPU),
        _end_to_end("qwen3-tiny", _SMALL_LIMIT_S, "cpu", "--small", environment=_NO_GPU),
        *_sanitizers(_SMALL_LIMIT_S, environment=_NO_GPU),
        _correctness("two_devices tests", _SMALL_LIMIT_S, _SECOND, environment=_NO_GPU),
        _serving("two_devices qwen3-tiny", "qwen3-tiny", _SMALL_LIMIT_S, _SECOND, "--small", environment=_NO_GPU),
        _transformers("qwen3-tiny", _SMALL_LIMIT_S, "cpu", "--small", environment=_NO_GPU),
        _transformers("llama-tiny", _SMALL_LIMIT_S, "cpu", "--small", environment=_NO_GPU),
    ]


def _phase(name: str, command: str, limit_s: float, *flags: str, **settings: Any) -> Phase:
    return Phase(name, ("-m", "bench", command, *flags, "--json", OUTPUT), limit_s, **settings)


def _correctness(name: str, limit_s: float, device: str, *flags: str, **settings: Any) -> Phase:
    return _phase(name, "gpu-correctness", limit_s, "--device", device, *flags, is_vital=True, **settings)


def _sanitizers(limit_s: float, **settings: Any) -> list[Phase]:
    return [_correctness(f"sanitizer {tool}", limit_s, "cuda", "--sanitizer", tool, **settings) for tool in SANITIZERS]


def _end_to_end(shape: str, limit_s: float, device: str, *flags: str, **settings: Any) -> Phase:
    return _serving(f"end_to_end {shape}", shape, limit_s, device, *flags, **settings)


def _serving(name: str, shape: str, limit_s: float, device: str, *flags: str, **settings: Any) -> Phase:
    return _phase(name, "gpu-serving", limit_s, "--shape", shape, "--device", device, *flags, **settings)


def _transformers(shape: str, limit_s: float, device: str, *flags: str, **settings: Any) -> Phase:
    flags = ("--shape", shape, "--device", device, *flags)
    return _phase(f"transformers {shape}", "gpu-transformers", limit_s, *flags, **settings)


def select(phases: Sequence[Phase], wanted: str) -> list[Phase]:
    """Returns the phases whose names begin with one of the given words, separated by commas; all for an empty text.

    Raises ValueError with the list of names if a given word begins none.
    """
    prefixes = [prefix.strip() for prefix in wanted.split(",") if prefix.strip()]
    for prefix in prefixes:
        if not any(phase.name.startswith(prefix) for phase in phases):
            names = "".join(f"\n  {phase.name}" for phase in phases)
            raise ValueError(f"no phase begins with {prefix!r}; there are:{names}")
    return [phase for phase in phases if not prefixes or phase.name.startswith(tuple(prefixes))]


def run(phases: Sequence[Phase], device: torch.device, budget_s: float, folder: Path) -> bool | None:
    """Runs the phases one after the other, and writes their records into the folder.

    A phase starts only while the budget lasts, and is cut off at its end; one that does not start leaves its earlier
    record. Returns True if all vital phases that could run have passed, None if there was none.
    """
    deadline_s = time.monotonic() + budget_s
    is_correct: bool | None = None
    with tempfile.TemporaryDirectory() as directory:
        for phase in phases:
            limit_s = min(phase.limit_s, deadline_s - time.monotonic())
            if limit_s <= 0:
                print(f"{phase.name}: not started, no time is left", flush=True)
                continue
            keep = partial(save_record, folder, phase.name, describe_machine(device))
            result = run_phase(phase, Path(directory) / "results.json", limit_s, keep)
            keep(result)
            _say(phase.name, result)
            if phase.is_vital and result.status != "skipped":
                is_correct = is_correct is not False and result.status == "passed"
    return is_correct


def _say(name: str, result: PhaseResult) -> None:
    why = f" ({result.reason})" if result.reason else ""
    print(f"{name}: {result.status}{why} after {result.wall_s:.0f} s", flush=True)


def show(records: Mapping[str, dict[str, Any]], console: Console) -> None:
    """Prints the table of kernels, the status of the phases with the tests that failed, and the targets."""
    if not records:
        console.print("no results")
        return
    results = {name: record["results"] for name, record in records.items() if record["results"]}
    if "rows" in (measured := results.get("kernels", {})):
        console.print(kernels.render_table(measured))
    for name, record in records.items():
        why = f" ({record['reason']})" if record["reason"] else ""
        part = ", partial results" if record["is_partial"] else ""
        console.print(f"{name}: {record['status']}{why} in {record['wall_s']:.0f} s of {record['limit_s']:.0f}{part}")
        _show_tests(results.get(name, {}), console)
    device = next(iter(records.values()))["machine"]["device"]
    wanted = targets.targets_for(device)
    if not wanted:
        console.print(f"there are no targets for {device}, only for H100 and H200 SXM", markup=False)
        return
    partial_phases = {name for name, record in records.items() if record["is_partial"]}
    console.print(targets.render_table(device, targets.outcomes(wanted, results, partial_phases)))


def _show_tests(results: Mapping[str, Any], console: Console) -> None:
    if "passed_by_dtype" not in results:
        return
    dtypes = "".join(f", {number} in {dtype}" for dtype, number in sorted(results["passed_by_dtype"].items()))
    console.print(f"  {results['passed']} passed{dtypes}; {results['failed']} failed, {results['skipped']} skipped")
    for failure in results["failures"]:
        console.print(f"  {failure['name']}: {failure['reason']}", markup=False)


def main(arguments: Sequence[str]) -> int:
    parser = Parser("gpu-check", __doc__)
    parser.add_argument("--small", action="store_true", help="run small phases on the CPU even if there is a GPU")
    parser.add_argument("--phase", default="", help="first words of the names of phases, separated by commas")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds for all phases of this call")
    parser.add_argument("--show", action="store_true", help="run nothing, show the results of the folder")
    parser.add_argument("--output", type=Path, help="folder of results (default: bench/results/DEVICE-DATE)")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running phase ends too

    console = open_console()
    is_small = given.small or not torch.cuda.is_available()
    if is_small and not given.show:
        console.print("small phases run on the CPU, which checks the harness and measures nothing")
    device = torch.device("cpu" if is_small else "cuda")
    try:
        phases = select(small_phases() if is_small else gpu_phases(), given.phase)
    except ValueError as error:
        parser.error(f"--phase: {error}")
    folder: Path = given.output or _RESULTS / folder_name(describe_machine(device), is_small=is_small)
    is_correct = None if given.show else run(phases, device, given.budget_s, folder)
    show(load_records(folder), console)
    console.print(f"results: {folder}", markup=False)
    return 1 if is_correct is False else 0
