"""Runs the tests of the code that runs on a device, and counts their outcomes.

    python -m bench gpu-correctness --device cuda --json FILE

Exits with status 1 if a test failed, if none ran, and on a GPU if no test covered the 16-bit kernels.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command_line import Parser
from bench.report import save

_ROOT = Path(__file__).resolve().parents[2]
_KERNELS = "tests/kernels/triton"
_EXECUTOR = "tests/executor/cuda"
_DEVICE_DTYPES = ("float16", "bfloat16")
# The tests of attention, which matter most here, have the dtype in their names.
_DTYPE = re.compile(r"(?<=[-\[])(?:float32|float16|bfloat16)(?=[-\]])")
_MAX_WORKERS = 12  # each holds a CUDA context, and compiles
_TEST_TIMEOUT_S = 100
_MAX_FAILURES = 25


def pytest_arguments(device: str, outcomes: Path) -> list[str]:
    """Selects all tests on a GPU; without one, those that take seconds in Triton's interpreter."""
    own = [
        "-o",
        "addopts=",
        "-q",
        "--tb=short",
        "-o",
        f"timeout={_TEST_TIMEOUT_S}",
        f"--maxfail={_MAX_FAILURES}",
        "-p",
        "bench.gpu.outcomes",
        f"--outcomes={outcomes}",
    ]
    own += ["-p", "no:cacheprovider"]
    if device != "cuda":
        return [*own, f"{_KERNELS}/test_elementwise.py", f"{_KERNELS}/test_work.py"]
    if importlib.util.find_spec("xdist") is not None:
        own += ["-n", str(min(_MAX_WORKERS, len(os.sched_getaffinity(0))))]
    # These tests are for machines without a GPU.
    skipped = [f"--ignore-glob=*/test_{name}.py" for name in ("interpreted", "compiles")]
    return [*own, *skipped, _KERNELS, *([_EXECUTOR] if (_ROOT / _EXECUTOR).is_dir() else [])]


def counts(outcomes: Path) -> dict[str, Any]:
    """Counts the outcomes in a file of `bench.gpu.outcomes`, in total and by dtype, and lists the failures."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "passed_by_dtype": {}, "failures": []}
    for line in outcomes.read_text(encoding="utf-8").splitlines():
        outcome, name = line.split(" ", 1)
        found[outcome] += 1
        if outcome == "failed":
            found["failures"].append(name)
        if outcome == "passed":
            for dtype in set(_DTYPE.findall(name)):
                found["passed_by_dtype"][dtype] = found["passed_by_dtype"].get(dtype, 0) + 1
    return found


def is_correct(device: str, found: dict[str, Any], return_code: int) -> bool:
    """Returns True if all tests passed and, on a GPU, tests of each 16-bit dtype were among them."""
    has_dtypes = device != "cuda" or all(found["passed_by_dtype"].get(dtype) for dtype in _DEVICE_DTYPES)
    return return_code == 0 and found["passed"] > 0 and found["failed"] == 0 and has_dtypes


def _run(command: list[str]) -> int:
    """Runs the tests. SIGTERM ends them; the tests that have run by then count."""
    process = subprocess.Popen(command, cwd=_ROOT)
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    return process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = Parser("gpu-correctness", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="file of the counts")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        outcomes = Path(directory) / "outcomes"
        outcomes.touch()
        return_code = _run([sys.executable, "-m", "pytest", *pytest_arguments(given.device, outcomes)])
        found = counts(outcomes)
    save(given.json, {"device": given.device, **found})
    return 0 if is_correct(given.device, found, return_code) else 1
