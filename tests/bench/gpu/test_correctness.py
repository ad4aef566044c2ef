"""The phase of tests: which tests run where, and the counts of their outcomes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import correctness
from bench.gpu.correctness import SANITIZED, counts, is_correct, pytest_arguments
from tests.support.paths import ROOT

OUTCOMES = """\
{"outcome": "passed", "name": "tests/a.py::test_decode[128-bfloat16-0]"}
{"outcome": "passed", "name": "tests/a.py::test_decode[64-float16-100]"}
{"outcome": "skipped", "name": "tests/a.py::test_decode[float32]"}
{"outcome": "failed", "name": "tests/a.py::test_prefill[80-bfloat16-0]", "reason": "AssertionError: row 3"}
{"outcome": "failed", "name": "tests/b.py::test_other[of two words]", "reason": "OSError"}
{"outcome": "passed", "name": "tests/b.py::test_last"}
{"outcome": "passed", "na"""


def test_counts_sum_outcomes_by_dtype(tmp_path: Path) -> None:
    """The last line is being written and does not count yet."""
    path = tmp_path / "outcomes"
    path.write_text(OUTCOMES)
    assert counts(path) == {
        "passed": 3,
        "failed": 2,
        "skipped": 1,
        "passed_by_dtype": {"bfloat16": 1, "float16": 1},
        "failures": [
            {"name": "tests/a.py::test_prefill[80-bfloat16-0]", "reason": "AssertionError: row 3"},
            {"name": "tests/b.py::test_other[of two words]", "reason": "OSError"},
        ],
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
def test_outcomes_count_after_sigterm(workers: str, tmp_path: Path) -> None:
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
        "correctness.pytest_arguments = lambda device, outcomes, is_sanitized: [*own, f'--outcomes={outcomes}']\n"
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
    assert [failure["name"] for failure in found["failures"]] == [
        "test_it.py::test_fails",
        "test_it.py::test_is_not_called",
    ]
    assert [failure["reason"] for failure in found["failures"]] == ["assert False", "OSError"]
    assert {name: found[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 2, "skipped": 1}


def test_kernel_tests_run_on_a_device(tmp_path: Path) -> None:
    arguments = pytest_arguments("cuda", tmp_path / "outcomes")
    assert "tests/kernels/triton" in arguments
    ignored = [argument for argument in arguments if argument.startswith("--ignore-glob=")]
    assert [path.rpartition("_")[2] for path in ignored] == ["interpreted.py", "compiles.py"]


def test_executor_tests_alone_run_on_a_second_device(tmp_path: Path) -> None:
    arguments = pytest_arguments("cuda:1", tmp_path / "outcomes")
    assert "tests/executor/cuda" in arguments
    assert "tests/kernels/triton" not in arguments


def test_sanitized_tests_exist(tmp_path: Path) -> None:
    assert pytest_arguments("cuda", tmp_path, is_sanitized=True)[-len(SANITIZED) :] == list(SANITIZED)
    for test in SANITIZED:
        file, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test_") in (ROOT / file).read_text()


def test_tests_read_the_device_from_the_environment() -> None:
    text = (ROOT / "tests" / "support" / "cuda" / "runner_pair.py").read_text()
    assert f'os.environ.get("{correctness._TEST_DEVICE}", "cuda:0")' in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--device", "cuda:77"), "needs cuda:77, and torch sees"),
        (("--device", "cpu", "--sanitizer", "memcheck"), "compute-sanitizer is not on PATH"),
    ],
)
def test_what_cannot_run_here_is_skipped_with_a_reason(
    flags: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "counts.json"
    assert correctness.main([*flags, "--json", str(output)]) == 0
    (found,) = json.loads(output.read_text()).values()
    assert reason in found


# Writes into the file after --log-file, runs the command, and exits with 97 if an error is expected.
SANITIZER = """\
#!/bin/sh
test "$1 $2 $3 $4 $5 $6 $7" = "--tool racecheck --target-processes application-only --error-exitcode 97 --log-file"
printf '========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: %s errors\n' "$FOUND" > "$8"
shift 8
"$@" || exit 1
test "$FOUND" = 0 || exit 97
"""


@pytest.mark.parametrize(("num_errors", "expected"), [(0, 0), (2, 1)])
def test_findings_of_the_sanitizer_fail_the_phase(num_errors: int, expected: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_passes(): assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
    )
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from bench.gpu import correctness\n"
        f"correctness._ROOT = Path({str(tmp_path)!r})\n"
        "correctness.SANITIZED = ('test_it.py',)\n"
        "correctness.check_here = lambda device: None\n"
        "sys.exit(correctness.main(sys.argv[1:]))\n"
    )
    output = tmp_path / "counts.json"
    path = f"{sanitizer.parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        [sys.executable, "-c", program, "--device", "cuda", "--sanitizer", "racecheck", "--json", str(output)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "FOUND": str(num_errors)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == expected, finished.stdout + finished.stderr
    found = json.loads(output.read_text())
    assert (found["passed"], found["sanitizer"], found["return_code"]) == (1, "racecheck", 97 if num_errors else 0)
    assert found["findings"][-1] == f"========= RACECHECK SUMMARY: {num_errors} errors"
