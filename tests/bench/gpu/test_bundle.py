"""A bundle is complete, small and made for the machine; otherwise the message says what is wrong."""

import json
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.command_line import BenchError
from bench.gpu import bundle
from tests.support.paths import ROOT

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
WHEELS = ["brought_along-1.0-py3-none-any.whl", "also_brought-1.0-py3-none-any.whl"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes a bundle with this tree's stubs and two small wheels, without an index."""
    target = tmp_path / "bundle"
    (target / "wheels").mkdir(parents=True)
    for name in WHEELS:
        package = name.split("-")[0]
        with zipfile.ZipFile(target / "wheels" / name, "w") as wheel:
            info = f"{package}-1.0.dist-info"
            wheel.writestr(f"{package}/__init__.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    for name in ("v1", "executor"):
        shutil.copytree(ROOT / "quire" / name, target / "quire" / name)
    manifest = {"python": PYTHON, "wheels": WHEELS, "protos": bundle._digest_of_protos()}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def change(folder: Path, **values: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- making ---------------------------------------------------------------------------------------------------------


def test_carried_is_what_the_machine_lacks_with_all_that_it_requires() -> None:
    carried = bundle._carried("3.12")
    lacking = {
        "structlog",
        "grpcio-health-checking",
        "grpcio-reflection",
        "googleapis-common-protos",
        "aiohttp",
        "psutil",
    }
    assert lacking | {"yarl", "multidict", "pytest-xdist", "execnet"} <= set(carried)
    assert {"grpcio", "protobuf"} <= set(carried)  # the stubs need these versions
    assert not {"torch", "triton", "transformers", "numpy", "numba", "typer", "jinja2", "tokenizers"} & set(carried)
    assert [line.split("==")[0].lower().replace("_", "-") for line in bundle.pinned(carried)] == carried


def test_distribution_without_a_pinned_version_is_refused() -> None:
    with pytest.raises(BenchError, match=r"constraints\.txt has no version of left-pad, right-pad"):
        bundle.pinned(["aiohttp", "left-pad", "right-pad"])


def test_wheel_that_no_index_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BenchError, match=r"pip download: .*structlog==26"):
        bundle._download(["structlog==26.1.0"], tmp_path / "wheels", "3.12")


def test_bundle_that_is_too_large_is_refused_and_names_the_largest_files(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "large.whl").write_bytes(bytes(3 << 20))
    (tmp_path / "wheels" / "small.whl").write_bytes(bytes(1 << 20))
    assert bundle.size_within(tmp_path, 4 << 20) == 4 << 20
    with pytest.raises(BenchError, match=r"4\.0 MiB, more than 3; largest: large\.whl \(3\.0\), small\.whl \(1\.0\)"):
        bundle.size_within(tmp_path, 3 << 20)


def test_folder_that_holds_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BenchError, match="holds something else"):
        bundle.make(tmp_path, "3.12")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_stubs_are_generated_for_every_proto_file(tmp_path: Path) -> None:
    bundle._generate_stubs(tmp_path / "generated", tmp_path / "quire")
    assert [path for path in bundle.stubs() if not (tmp_path / path).is_file()] == []
    assert (tmp_path / "quire" / "executor" / "__init__.py").is_file()


# --- using ----------------------------------------------------------------------------------------------------------


def test_complete_bundle_is_accepted(folder: Path) -> None:
    assert bundle.check(folder)["wheels"] == WHEELS


def test_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"is no bundle .*gpu-bundle` makes it"):
        bundle.check(tmp_path)


def test_bundle_for_another_python_is_refused(folder: Path) -> None:
    change(folder, python="3.9")
    with pytest.raises(
        BenchError, match=rf"for Python 3\.9, and .* is {PYTHON}; make it again with `--python {PYTHON}`"
    ):
        bundle.check(folder)


def test_missing_wheels_are_named_all_at_once(folder: Path) -> None:
    for name in WHEELS:
        (folder / "wheels" / name).unlink()
    with pytest.raises(BenchError, match=f"lacks wheels: {', '.join(WHEELS)}"):
        bundle.check(folder)


def test_missing_stubs_are_named_all_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "quire" / "executor")
    with pytest.raises(BenchError, match=r"lacks stubs: \S+executor_pb2\.py, \S+executor_pb2_grpc\.py"):
        bundle.check(folder)


def test_stubs_of_other_proto_files_are_refused(folder: Path) -> None:
    change(folder, protos="0" * 64)
    with pytest.raises(BenchError, match=r"other \.proto files"):
        bundle.check(folder)


def test_broken_wheel_is_named(folder: Path) -> None:
    (folder / "wheels" / WHEELS[0]).write_bytes(b"half a file")
    with pytest.raises(BenchError, match=r"pip install: .*brought_along"):
        bundle.use(folder, [sys.executable, "-c", "pass"])


PROBE = """
import also_brought, brought_along, json, sys
from pathlib import Path
import quire.v1.generation_pb2, bench, tests
modules = (brought_along, quire.v1.generation_pb2, bench, tests)
found = {"files": [module.__file__ for module in modules], "results": str(Path("bench/results").resolve())}
Path(sys.argv[1]).write_text(json.dumps(found))
sys.exit(7)
"""


def test_command_runs_with_the_wheels_and_stubs_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before = sorted(ROOT.iterdir())
    assert bundle.use(folder, [sys.executable, "-c", PROBE, str(tmp_path / "found.json")]) == 7
    found = json.loads((tmp_path / "found.json").read_text())
    assert not any(Path(name).is_relative_to(ROOT) for name in found["files"])
    assert not any(Path(name).exists() for name in found["files"])  # the temporary folder is gone
    assert found["results"] == str(ROOT / "bench" / "results")
    assert sorted(ROOT.iterdir()) == before


def test_termination_ends_the_command_and_removes_the_folder(folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shell = f"pwd > {here}.part; mv {here}.part {here}; exec sleep 600"
    command = [sys.executable, "-m", "bench", "gpu-bundle", "--use", str(folder), "--shell", shell]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while not here.exists():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert not Path(here.read_text().strip()).exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of --output and --use"),
        (("--output", "x", "--phase", "kernels"), "unrecognized arguments: --phase kernels"),
        (("--use", "x", "--shell", "true", "--phase", "kernels"), "unrecognized arguments: --phase kernels"),
        (("--output", "x", "--shell", "true"), "--shell needs --use"),
    ],
)
def test_wrong_flags_are_usage_errors(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bundle.main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_flags_of_the_check_are_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative folder of results is one of the caller, not of the copy."""
    commands: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(bundle, "use", lambda path, command: commands.append((path, command)) or 0)
    monkeypatch.chdir(tmp_path)
    assert bundle.main(["--use", "bundle", "--phase", "kernels", "--output", "results"]) == 0
    check = [sys.executable, "-m", "bench", "gpu-check", "--phase", "kernels"]
    assert commands == [(folder, [*check, "--output", str(tmp_path / "results")])]
