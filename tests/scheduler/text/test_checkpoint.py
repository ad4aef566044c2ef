"""Where a model comes from, and what is said when it does not."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.config import SchedulerConfig
from scheduler.main import load_model
from scheduler.text.checkpoint import FILES, Checkpoint, CheckpointError
from tests.support.paths import ROOT

TINY = ROOT / "models" / "tiny"


def test_a_directory(tmp_path: Path) -> None:
    assert Checkpoint.find(str(tmp_path)) == Checkpoint(tmp_path)


@pytest.mark.parametrize("model", ["", "no/such/directory", "/no/such", "nothing", "../x/y", "a b/c", "-x/y"])
def test_nothing_of_that_name(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":
        return  # the working directory; the configuration refuses it
    with pytest.raises(CheckpointError, match="no such directory, and no hub id"):
        Checkpoint.find(model)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(CheckpointError, match="a file; expected the directory"):
        Checkpoint.find(str(tmp_path / "model.gguf"))


def test_a_hub_id_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="needs the package huggingface_hub"):
        Checkpoint.find("some/model")


def test_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, revision=revision, allow_patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert Checkpoint.find("some/model-1.5").directory == tmp_path
    assert asked == {"repository": "some/model-1.5", "revision": None, "allow_patterns": list(FILES)}


def test_a_pinned_revision_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def snapshot_download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(revision)
        return str(TINY)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    load_model(SchedulerConfig(model="some/model", revision="v2")).tokenizer.close()
    assert asked == ["v2"]


def test_a_hub_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(CheckpointError, match="no route to host"):
        Checkpoint.find("some/model")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(tmp_path).json_object("config.json")
