"""The rehearsal fails for a phase that did not pass, and its environment has only the machine's packages.

`.ci/run` runs the rehearsal itself.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from checks import gpu_rehearsal
from checks.gpu_rehearsal import RehearsalFailed, check_results, files_of, isolated, run


def phase(**values: Any) -> dict[str, Any]:
    return {"status": "passed", "results": {"passed": 3}, "last_lines": [], **values}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def test_phases_that_passed_are_accepted(results: Path) -> None:
    results.write_text(json.dumps({"phases": {"environment": phase(), "correctness": phase()}}))
    check_results(results, ("environment", "correctness"))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({}, "only"),
        ({"environment": phase()}, r"only \['environment'\] ran"),
        ({"environment": phase(status="failed", last_lines=["psutil is missing"])}, "psutil is missing"),
        ({"environment": phase(status="cut off")}, "environment cut off"),
        ({"environment": phase(), "correctness": phase(results=None)}, "correctness left no results"),
    ],
)
def test_anything_else_fails(phases: dict[str, Any], message: str, results: Path) -> None:
    results.write_text(json.dumps({"phases": phases}))
    with pytest.raises(RehearsalFailed, match=message):
        check_results(results, ("environment", "correctness"))


def test_failing_command_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(RehearsalFailed, match=r"status 3:\nno index"):
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
