"""The environment phase names all that is wrong at once, and keeps what it has found."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import bundle, environment, requirements

PARTS = ["versions", "missing_packages", "failing_stubs", "tools", "precision", "first_kernel"]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "new" / "environment.json"


def run(output: Path, device: str = "cpu") -> tuple[int, dict[str, Any]]:
    status = environment.main(["--device", device, "--json", str(output)])
    return status, json.loads(output.read_text())


def without(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Makes packages appear with other versions, or missing (None)."""
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    real = requirements._installed_version
    monkeypatch.setattr(
        requirements, "_installed_version", lambda name: changed[name] if name in changed else real(name)
    )


def test_complete_environment_passes_and_compiles_a_kernel(output: Path) -> None:
    status, report = run(output)
    assert (status, report["problems"]) == (0, [])
    assert [name for name in report if name in PARTS] == PARTS
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["executable"] == sys.executable
    assert report["precision"].keys() >= {"cuda.matmul.allow_tf32", "cudnn.allow_tf32"}
    assert report["first_kernel"]["is_compiled"]
    assert not report["first_kernel"]["has_run"]
    assert report["first_kernel"]["cubin_bytes"] > 0


def test_precision_is_that_of_torch() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        for value in (False, True):
            matmul.allow_bf16_reduced_precision_reduction = value
            assert environment.precision()["cuda.matmul.allow_bf16_reduced_precision_reduction"] is value
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def test_missing_packages_are_named_all_at_once(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, structlog=None, aiohttp=None, yarl=None, grpcio="1.62.0")
    status, report = run(output)
    assert status == 1
    wanted = ["aiohttp is missing", "grpcio 1.62.0 is not >=1.80", "structlog is missing", "yarl is missing"]
    assert report["missing_packages"] == report["problems"] == wanted
    assert report["first_kernel"]["is_compiled"]  # the parts after it ran
    assert capsys.readouterr().err.splitlines() == [f"problem: {line}" for line in wanted]


def test_missing_stubs_are_named(tmp_path: Path, output: Path) -> None:
    """The command runs in a tree without stubs, although the rest of quire cannot be imported there."""
    bundle._copy_tree(tmp_path / "tree")
    for folder in ("v1", "executor"):
        shutil.rmtree(tmp_path / "tree" / "quire" / folder)
    command = [sys.executable, "-m", "bench", "gpu-environment", "--device", "cpu", "--json", str(output)]
    done = subprocess.run(command, cwd=tmp_path / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    failing = json.loads(output.read_text())["failing_stubs"]
    names = [line.split(":")[0] for line in failing]
    assert names == [str(path.with_suffix("")).replace("/", ".") for path in bundle.stubs()]
    assert "No module named 'quire.v1'" in "".join(failing)


def test_check_in_a_tree_without_stubs_says_what_generates_them(tmp_path: Path) -> None:
    bundle._copy_tree(tmp_path / "tree")
    shutil.rmtree(tmp_path / "tree" / "quire" / "v1")
    command = [sys.executable, "-m", "bench", "gpu-check"]
    done = subprocess.run(command, cwd=tmp_path / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("bench gpu-check: No module named 'quire.v1'; `make protos` generates the stubs")


def test_stub_that_refuses_an_old_package_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refusing_stub.py").write_text("raise RuntimeError('The grpc package installed is at version 1.62')")
    monkeypatch.syspath_prepend(tmp_path)
    assert environment._import_error("refusing_stub") == "RuntimeError: The grpc package installed is at version 1.62"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_absent_gpu_is_a_problem(output: Path) -> None:
    status, report = run(output, "cuda")
    assert status == 1
    assert report["gpu"] is None
    assert report["first_kernel"] is None
    assert "finds no GPU" in report["problems"][0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_is_described_and_runs_the_kernel(output: Path) -> None:
    status, report = run(output, "cuda")
    assert (status, report["problems"]) == (0, [])
    assert report["first_kernel"]["has_run"]
    assert 0 < report["gpu"]["memory_free"] <= report["gpu"]["memory_total"]
    assert report["gpu"]["shared_memory_per_block"] >= 48 << 10


def test_parts_are_kept_if_a_later_one_ends_the_process(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(device: str) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(environment, "first_kernel", ends)
    with pytest.raises(SystemExit):
        environment.main(["--device", "cpu", "--json", str(output)])
    assert [name for name in json.loads(output.read_text()) if name in PARTS] == PARTS[:-1]


@pytest.mark.parametrize(
    ("script", "wanted"),
    [("echo '580.1, 345 MHz, 1980 MHz, 1, 2, 700 W, 30, Disabled'", "580.1"), ("exit 9", None)],
)
def test_driver_is_read_from_nvidia_smi(
    script: str, wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = environment._nvidia_smi()
    assert (found and found["driver_version"]) == wanted
    assert environment.tools()["nvidia-smi"] == str(program)


def test_requirements_cover_services_tests_and_phases() -> None:
    names = {each.name for each in requirements.needed()}
    assert names >= {"structlog", "aiohttp", "psutil", "grpcio-health-checking", "pytest-xdist", "pytest-timeout"}
    assert not names & {"mypy", "ruff", "matplotlib", "hypothesis", "pytest-asyncio"}
