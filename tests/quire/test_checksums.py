"""Manifests and snapshots of the hub: damaged, missing and additional files are refused by name."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from quire.checksums import (
    MANIFEST,
    TEXT_FILES,
    TOOL_TEMPLATE,
    WEIGHT_FILES,
    ChecksumError,
    file_digest,
    read_manifest,
    verify,
    write_manifest,
)
from quire.cli.main import app
from quire.model_path import embedded_model
from tests.support.hub import as_snapshot

if TYPE_CHECKING:
    from pathlib import Path

DIGEST = "0" * 64
ALL = (*TEXT_FILES, *WEIGHT_FILES)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors", "README.md"):
        write(directory / name, f"contents of {name}")
    return directory


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def complaint(directory: Path, patterns: tuple[str, ...] = ALL) -> str:
    with pytest.raises(ChecksumError) as error:
        verify(directory, patterns)
    return str(error.value)


def test_without_digests_nothing_is_refused(model: Path) -> None:
    verify(model, ALL)


def test_sha256sum_reads_what_the_command_writes(model: Path) -> None:
    result = CliRunner().invoke(app, ["checksum", str(model)])
    assert result.exit_code == 0, result.output
    assert result.output.split() == ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
    verify(model, ALL)
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", MANIFEST], cwd=model, check=True, capture_output=True)
        own = subprocess.run(
            ["sha256sum", "-b", *result.output.split()], cwd=model, check=True, capture_output=True, text=True
        )
        (model / MANIFEST).write_text("# made by hand\n" + own.stdout.upper().replace("MODEL-", "model-"))
        assert "config.json" in complaint(model), "the name CONFIG.JSON is another file"
        (model / MANIFEST).write_text("# made by hand\n" + own.stdout)
        verify(model, ALL)


def test_the_command_refuses_what_is_no_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checksum", str(tmp_path)])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-2.safetensors", TOOL_TEMPLATE])
def test_a_changed_file_is_refused_by_its_name(model: Path, name: str) -> None:
    write(model / TOOL_TEMPLATE, "contents of a template")
    write_manifest(model)
    verify(model, ALL)
    write(model / name, f"Contents of {name}")
    assert complaint(model).startswith(f"{model / name}: the file is damaged or was changed: its digest is ")


def test_each_service_checks_the_files_that_it_reads(model: Path) -> None:
    write_manifest(model)
    (model / "model-1.safetensors").unlink()
    verify(model, TEXT_FILES)
    assert complaint(model, WEIGHT_FILES) == f"{model / 'model-1.safetensors'}: missing, but {MANIFEST} lists it"


@pytest.mark.parametrize("name", ["model-3.safetensors", "generation_config.json", TOOL_TEMPLATE])
def test_an_additional_file_is_refused(model: Path, name: str) -> None:
    write_manifest(model)
    write(model / name, "{}")
    assert complaint(model).startswith(f"{model / name}: {MANIFEST} does not list it")


LINES = {
    "a path upwards": (f"{DIGEST}  ../config.json", "'../config.json' is not the name of a file in the manifest's"),
    "an absolute path": (f"{DIGEST}  /etc/passwd", "'/etc/passwd' is not the name"),
    "a folder": (f"{DIGEST}  a/config.json", "'a/config.json' is not the name"),
    "the folder above": (f"{DIGEST}  ..", "'..' is not the name"),
    "an escaped name": (f"\\{DIGEST}  a\\nb", "expected 64 hexadecimal digits"),
    "a backslash": (f"{DIGEST}  a\\b", "is not the name"),
    "a control character": (f"{DIGEST}  config.json\r", "is not the name"),
    "a long line": (f"{DIGEST}  {'a' * 600}", "longer than 512 characters"),
    "a short digest": ("0" * 63 + "  config.json", "expected 64 hexadecimal digits"),
    "another format": (f"SHA256 (config.json) = {DIGEST}", "expected 64 hexadecimal digits"),
    "an empty line": ("", "expected 64 hexadecimal digits"),
    "a file twice": (f"{DIGEST}  x\n{DIGEST}  x", "line 6: 'x' is listed twice"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_malformed_manifest_is_refused_by_its_line(model: Path, kind: str) -> None:
    write_manifest(model)
    line, problem = LINES[kind]
    with (model / MANIFEST).open("a") as file:
        file.write(line + "\n")
    message = complaint(model)
    assert message.startswith(f"{model / MANIFEST}, line ")
    assert problem in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("content", "problem"), [(b"\xff\xfe", "not UTF-8"), (b"#" * (1 << 20) + b"\n", "larger than 1,048,576 bytes")]
)
def test_a_manifest_of_another_kind_is_refused(model: Path, content: bytes, problem: str) -> None:
    (model / MANIFEST).write_bytes(content)
    assert complaint(model).startswith(f"{model / MANIFEST}: {problem}")


def test_a_manifest_without_entries_lists_no_file(model: Path) -> None:
    (model / MANIFEST).write_text("# nothing\n")
    assert "does not list it" in complaint(model)
    (model / MANIFEST).write_text("")
    assert "line 1: expected" in complaint(model)


@pytest.mark.parametrize("name", [MANIFEST, "config.json"])
@pytest.mark.parametrize("target", ["elsewhere", "missing", "/dev/zero"])
def test_links_are_refused(model: Path, tmp_path: Path, name: str, target: str) -> None:
    write_manifest(model)
    shutil.move(model / name, tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / target)
    assert complaint(model).startswith(f"{model / name}: a link;")
    with pytest.raises(ChecksumError):
        write_manifest(model) if name != MANIFEST else read_manifest(model)


def test_a_pipe_is_refused(model: Path) -> None:
    write_manifest(model)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert complaint(model) == f"{model / 'config.json'}: not a regular file"


def test_an_unreadable_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ChecksumError, match="No such file or directory"):
        verify(tmp_path / "gone", ALL)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-1.safetensors"])
def test_a_snapshot_of_the_hub_is_checked_by_the_names_of_its_files(model: Path, tmp_path: Path, name: str) -> None:
    snapshot = as_snapshot(model, tmp_path / "cache")
    verify(snapshot, ALL)
    with (snapshot / name).open("r+b") as file:
        file.write(b"C")
    message = complaint(snapshot)
    assert message.startswith(f"{snapshot / name}: the file is damaged")
    assert "but the hub says" in message


def test_a_snapshot_can_have_a_manifest(model: Path, tmp_path: Path) -> None:
    snapshot = as_snapshot(model, tmp_path / "cache")
    write_manifest(snapshot)
    verify(snapshot, ALL)
    with (snapshot / "model-1.safetensors").open("r+b") as file:
        file.write(b"C")
    assert f"but {MANIFEST} says" in complaint(snapshot)


def test_files_that_the_hub_names_in_another_way_are_not_checked(model: Path, tmp_path: Path) -> None:
    snapshot = as_snapshot(model, tmp_path / "cache")
    blob = (snapshot / "config.json").resolve()
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blob.rename(blob.with_name("W-etag")))
    verify(snapshot, ALL)


def test_digests_are_those_of_sha256_and_git(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(content := bytes(range(256)) * 10_000)
    assert file_digest(path) == hashlib.sha256(content).hexdigest()
    path.write_bytes(b"hello\n")
    assert file_digest(path, "git") == "ce013625030ba8dba906f756967f9e9ca394464a", "git hash-object"


def test_the_embedded_checkpoint_has_a_manifest() -> None:
    from pathlib import Path

    listed = read_manifest(Path(embedded_model()))
    assert listed is not None
    assert set(listed) > {"config.json", "model.safetensors", "tokenizer.json"}
    verify(Path(embedded_model()), ALL)
