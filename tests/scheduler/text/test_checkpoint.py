"""Checkpoints are found in directories and on the hub, and errors name the reason."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.checksums import TEXT_FILES
from scheduler.config import SchedulerConfig
from scheduler.main import load_model
from scheduler.text.checkpoint import Checkpoint, CheckpointError
from tests.support.paths import ROOT

TINY = ROOT / "models" / "tiny"


def test_directory_is_a_checkpoint(tmp_path: Path) -> None:
    assert Checkpoint.find(str(tmp_path)) == Checkpoint(tmp_path)


@pytest.mark.parametrize("model", ["", "no/such/directory", "/no/such", "nothing", "../x/y", "a b/c", "-x/y"])
def test_unknown_name_is_an_error(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":
        return  # means the working directory; the configuration refuses it
    with pytest.raises(CheckpointError, match="no such directory, and no hub id"):
        Checkpoint.find(model)


def test_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(CheckpointError, match="a file; expected the directory"):
        Checkpoint.find(str(tmp_path / "model.gguf"))


def test_hub_id_needs_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="needs the package huggingface_hub"):
        Checkpoint.find("some/model")


def test_hub_id_fetches_only_the_needed_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: dict[str, Any] = {}

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.update(repository=repository, revision=revision, allow_patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert Checkpoint.find("some/model-1.5").directory == tmp_path
    assert fetched == {"repository": "some/model-1.5", "revision": None, "allow_patterns": list(TEXT_FILES)}


def test_pinned_revision_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str | None] = []

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append(revision)
        return str(TINY)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    load_model(SchedulerConfig(model="some/model", revision="v2")).tokenizer.close()
    assert fetched == ["v2"]


def test_failure_of_the_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(CheckpointError, match="no route to host"):
        Checkpoint.find("some/model")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_broken_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(tmp_path).json_object("config.json")
