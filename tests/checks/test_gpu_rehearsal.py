"""The rehearsal fails for a phase that did not pass, and its environment has only the machine's packages.

`.ci/run` runs the rehearsal itself.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from checks import gpu_rehearsal
from checks.gpu_rehearsal import check_results, files_of, isolated, run
from checks.steps import CheckFailed

WANTED = ("environment", "correctness", "sanitizer memcheck")
SKIPPED = {"status": "skipped", "reason": "compute-sanitizer is not on PATH", "results": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes the results of three phases, none of which is a reason to fail."""
    write(tmp_path, "environment")
    write(tmp_path, "correctness")
    write(tmp_path, "sanitizer memcheck", **SKIPPED)
    return tmp_path


def write(folder: Path, name: str, **values: Any) -> None:
    record = {"phase": name, "status": "passed", "reason": "", "results": {"passed": 3}, "last_lines": [], **values}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_phases_that_passed_or_may_be_skipped_are_accepted(folder: Path) -> None:
    check_results(folder, WANTED)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("environment", {"status": "failed", "last_lines": ["psutil is missing"]}, "psutil is missing"),
        ("environment", {"status": "cut off"}, "environment: cut off"),
        ("correctness", {"status": "skipped", "reason": "no time"}, "correctness: skipped no time"),
        ("correctness", {"results": None}, "correctness left no results"),
        ("sanitizer memcheck", SKIPPED | {"reason": ""}, "sanitizer memcheck: skipped"),
    ],
)
def test_any_other_outcome_fails(name: str, values: dict[str, Any], message: str, folder: Path) -> None:
    write(folder, name, **values)
    with pytest.raises(CheckFailed, match=message):
        check_results(folder, WANTED)


def test_phase_without_a_file_fails(folder: Path) -> None:
    (folder / "environment.json").unlink()
    with pytest.raises(CheckFailed, match="no results of environment, only of correctness, sanitizer memcheck"):
        check_results(folder, WANTED)


def test_expected_phases_are_those_of_the_check() -> None:
    quick = gpu_rehearsal.expected_phases(gpu_rehearsal.QUICK_PHASES)
    assert quick == ["environment", "correctness"]
    assert {"kernels", "sanitizer memcheck", *quick} < set(gpu_rehearsal.expected_phases(()))


def test_failing_command_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"status 3:\nno index"):
        run(tmp_path, {}, "bash", "-c", "echo no index >&2; exit 3")


def test_written_files_are_found(tmp_path: Path) -> None:
    before = files_of(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "module.pyc").touch()
    assert files_of(tmp_path) == before
    (tmp_path / "left").touch()
    assert {name for name, _ in files_of(tmp_path) ^ before} == {"left"}


@pytest.mark.exhaustive
def test_linked_environment_has_the_machines_packages_only(tmp_path: Path) -> None:
    python = gpu_rehearsal.linked_environment(tmp_path / "bare")
    program = """
import importlib.util
from importlib.metadata import version
import google.protobuf, grpc, numba, prometheus_client, pytest, rich, torch, transformers, triton, typer
absent = "structlog grpc_health grpc_reflection google.rpc pytest_asyncio psutil aiohttp quire"
for name in absent.split():
    assert importlib.util.find_spec(name) is None, name
assert version("torch")
"""
    (tmp_path / "tmp").mkdir()
    command = [str(python), "-P", "-c", program]
    subprocess.run(command, check=True, cwd=tmp_path, env=isolated(tmp_path))
