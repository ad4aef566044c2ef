"""Runs the tests of the code that runs on a device, and counts their outcomes.

    python -m bench gpu-correctness --device cuda --json FILE
    python -m bench gpu-correctness --device cuda:1 --json FILE                       # the executor's tests on this GPU
    python -m bench gpu-correctness --device cuda --sanitizer memcheck --json FILE    # some kernels, compute-sanitizer

The counts are written while the tests run. Exits with status 1 if a test failed, if none ran, if the sanitizer reports
an error, and with `--device cuda` if no test covered the 16-bit kernels.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.command_line import Parser
from bench.gpu.scales import NotHere, check_here
from bench.report import save

SANITIZERS = ("memcheck", "racecheck")
_ROOT = Path(__file__).resolve().parents[2]
_KERNELS = "tests/kernels/triton"
_EXECUTOR = "tests/executor/cuda"
_DEVICE_DTYPES = ("float16", "bfloat16")
# The tests of attention, which matter most here, have the dtype in their names.
_DTYPE = re.compile(r"(?<=[-\[])(?:float32|float16|bfloat16)(?=[-\]])")
_MAX_WORKERS = 12  # each holds a CUDA context, and compiles
_TEST_TIMEOUT_S, _SANITIZED_TIMEOUT_S = 100, 250
_MAX_FAILURES = 25
_POLL_S = 2.0

# One test or a few for each kernel: under the sanitizer a kernel is many times slower.
SANITIZED = (
    f"{_KERNELS}/test_kv.py",
    f"{_KERNELS}/test_elementwise.py::test_norm_of_heads_inside_a_fused_projection",
    f"{_KERNELS}/test_elementwise.py::test_activation_equals_the_reference",
    f"{_KERNELS}/test_sampling.py::test_a_draw_never_selects_a_token_that_was_cut",
    f"{_KERNELS}/test_attention.py::test_query_and_output_can_be_views_of_wider_rows",
    f"{_KERNELS}/test_attention.py::test_one_plan_serves_all_layers",
    f"{_KERNELS}/test_attention.py::test_one_prefill_plan_serves_all_layers",
)
_SANITIZER = "compute-sanitizer"
_SANITIZER_FAILED = 97
_MAX_FINDINGS = 40
# Each tensor is allocated by itself, so that an access beyond its end is found.
_SANITIZED_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Read by tests/support/cuda/runner_pair.py.
_TEST_DEVICE = "QUIRE_TEST_DEVICE"


def pytest_arguments(device: str, outcomes: Path, *, is_sanitized: bool = False) -> list[str]:
    """Selects all tests on a GPU; without one, those that take seconds in Triton's interpreter.

    On a GPU with an index the tests of the executor are selected: they run there while cuda:0 is the current device.
    """
    own = [
        "-o",
        "addopts=",
        "-q",
        "--tb=short",
        "-o",
        f"timeout={_SANITIZED_TIMEOUT_S if is_sanitized else _TEST_TIMEOUT_S}",
        f"--maxfail={_MAX_FAILURES}",
        "-p",
        "bench.gpu.outcomes",
        f"--outcomes={outcomes}",
    ]
    own += ["-p", "no:cacheprovider"]
    if is_sanitized:
        return [*own, *SANITIZED]
    if device == "cpu":
        return [*own, f"{_KERNELS}/test_elementwise.py", f"{_KERNELS}/test_work.py"]
    if importlib.util.find_spec("xdist") is not None:
        own += ["-n", str(min(_MAX_WORKERS, len(os.sched_getaffinity(0))))]
    # These tests are for machines without a GPU.
    skipped = [f"--ignore-glob=*/test_{name}.py" for name in ("interpreted", "compiles")]
    return [*own, *skipped, *([_KERNELS] if device == "cuda" else []), _EXECUTOR]


def sanitizer_command(tool: str, log: Path) -> list[str]:
    """Returns the beginning of a command that runs under compute-sanitizer. Raises NotHere if it is not on PATH."""
    found = shutil.which(_SANITIZER)
    if found is None:
        raise NotHere(f"{_SANITIZER} is not on PATH")
    flags = ["--target-processes", "application-only", "--error-exitcode", str(_SANITIZER_FAILED)]
    return [found, "--tool", tool, *flags, "--log-file", str(log)]


def counts(outcomes: Path) -> dict[str, Any]:
    """Counts the outcomes in a file of `bench.gpu.outcomes`, in total and by dtype, and lists the failures."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "passed_by_dtype": {}, "failures": []}
    for line in outcomes.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):  # it is being written
            break
        values = json.loads(line)
        outcome, name = values["outcome"], values["name"]
        found[outcome] += 1
        if outcome == "failed":
            found["failures"].append({"name": name, "reason": values["reason"]})
        if outcome == "passed":
            for dtype in set(_DTYPE.findall(name)):
                found["passed_by_dtype"][dtype] = found["passed_by_dtype"].get(dtype, 0) + 1
    return found


def is_correct(device: str, found: dict[str, Any], return_code: int, *, needs_dtypes: bool = True) -> bool:
    """Returns True if all tests passed and, on a GPU, tests of each 16-bit dtype were among them."""
    has_dtypes = device != "cuda" or all(found["passed_by_dtype"].get(dtype) for dtype in _DEVICE_DTYPES)
    return return_code == 0 and found["passed"] > 0 and found["failed"] == 0 and (has_dtypes or not needs_dtypes)


def _run(command: list[str], environment: Mapping[str, str], keep: Callable[[], None]) -> int:
    """Runs the tests, and calls `keep` meanwhile. SIGTERM ends them; the tests that have run by then count."""
    process = subprocess.Popen(command, cwd=_ROOT, env=os.environ | dict(environment))
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    while True:
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            keep()


def _findings(log: Path) -> list[str]:
    """Returns the first lines that the sanitizer wrote, and the last, which is its summary."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [*lines[: _MAX_FINDINGS - 1], *lines[_MAX_FINDINGS - 1 :][-1:]]


def main(arguments: Sequence[str]) -> int:
    parser = Parser("gpu-correctness", __doc__)
    parser.add_argument("--device", required=True, help="cpu, cuda, or cuda:INDEX for the executor's tests alone")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="run some kernels under this tool of compute-sanitizer")
    parser.add_argument("--json", type=Path, required=True, help="file of the counts")
    given = parser.parse_args(arguments)
    is_sanitized = given.sanitizer is not None
    environment = _SANITIZED_ENVIRONMENT if is_sanitized else {}
    if given.device.startswith("cuda:"):
        environment = environment | {_TEST_DEVICE: given.device}
    with tempfile.TemporaryDirectory() as directory:
        outcomes, log = Path(directory) / "outcomes", Path(directory) / "sanitizer"
        outcomes.touch()

        def report() -> dict[str, Any]:
            found = {"device": given.device, **counts(outcomes)}
            return found | {"sanitizer": given.sanitizer, "findings": _findings(log)} if is_sanitized else found

        try:
            check_here(given.device)
            prefix = sanitizer_command(given.sanitizer, log) if is_sanitized else []
        except NotHere as error:
            save(given.json, {"skipped_because": str(error)})
            return 0
        tests = pytest_arguments(given.device, outcomes, is_sanitized=is_sanitized)
        command = [*prefix, sys.executable, "-m", "pytest", *tests]
        return_code = _run(command, environment, lambda: save(given.json, report()))
        found = report()
    save(given.json, {**found, "return_code": return_code})
    return 0 if is_correct(given.device, found, return_code, needs_dtypes=not is_sanitized) else 1
