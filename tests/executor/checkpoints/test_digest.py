"""The digest of a model's weights: equal for equal files, another one for other weights. Damaged files are refused."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.checkpoints import digest as module
from executor.checkpoints.digest import WeightsCheck
from executor.errors import CheckpointError
from quire.checksums import MANIFEST, write_manifest
from tests.support.executor.checkpoints import make_checkpoint
from tests.support.hub import as_snapshot

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("llama").directory, tmp_path / "model")


def weights_digest(directory: Path, *, is_random: bool = False) -> str:
    with WeightsCheck(directory, is_random=is_random) as check:
        return check.digest()


def test_a_copy_has_the_same_digest_and_random_weights_another(directory: Path, tmp_path: Path) -> None:
    digest = weights_digest(directory)
    assert len(digest) == 64
    assert weights_digest(shutil.copytree(directory, tmp_path / "copy")) == digest
    assert weights_digest(directory, is_random=True) not in (digest, "")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    assert weights_digest(directory, is_random=True), "random weights need no files"


def test_a_manifest_does_not_change_the_digest(directory: Path) -> None:
    before = weights_digest(directory)
    write_manifest(directory)
    assert weights_digest(directory) == before


def test_weights_that_are_not_loaded_do_not_change_the_digest(directory: Path, tmp_path: Path) -> None:
    """An older download of a repository of Mistral has all weights once more."""
    before = weights_digest(as_snapshot(directory, tmp_path / "new"))
    shutil.copy(directory / "model.safetensors", directory / "consolidated.safetensors")
    assert weights_digest(as_snapshot(directory, tmp_path / "old")) == before
    write_manifest(directory)
    assert weights_digest(directory) == before


def test_weights_that_differ_in_a_single_number_have_another_digest(directory: Path) -> None:
    before = weights_digest(directory)
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[50, 30] ^= 1
    save_file(tensors, path, {"format": "pt"})
    assert weights_digest(directory) != before


@pytest.mark.parametrize("is_random", [False, True])
def test_another_configuration_has_another_digest(directory: Path, is_random: bool) -> None:
    before = weights_digest(directory, is_random=is_random)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert weights_digest(directory, is_random=is_random) != before


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = make_checkpoint("llama", tmp_path / "sharded", max_shard_size="100KB").directory
    write_manifest(directory)
    return directory


def test_every_shard_is_checked(sharded: Path, make_runner) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    assert make_runner(sharded)
    for path in shards:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{path}: the file is damaged"):
            make_runner(sharded)
        path.write_bytes(whole)


def test_a_missing_and_an_additional_shard_are_named(sharded: Path, make_runner) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    moved = shard.rename(sharded / "other.safetensors")
    with pytest.raises(CheckpointError, match=f"{shard}: missing, but {MANIFEST} lists it"):
        make_runner(sharded)
    shutil.copy(moved, shard)
    with pytest.raises(CheckpointError, match=rf"{moved}: {MANIFEST} does not list it"):
        make_runner(sharded)


def test_random_weights_need_only_a_configuration_that_is_intact(directory: Path, make_runner) -> None:
    write_manifest(directory)
    (directory / "model.safetensors").unlink()
    assert make_runner(directory, load_format="random")
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    with pytest.raises(CheckpointError, match=r"config\.json: the file is damaged"):
        make_runner(directory, load_format="random")


def test_a_failing_load_names_the_damaged_file(directory: Path, make_runner) -> None:
    """A damaged file can fail the load in any way, and first."""
    write_manifest(directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file is damaged"):
        make_runner(directory)


def test_a_start_that_is_interrupted_does_not_wait_for_the_check(directory: Path, monkeypatch) -> None:
    has_begun, num_pieces = threading.Event(), 0

    def endless(path: Path, kind: str = "sha256", goes_on=lambda: True) -> str:
        nonlocal num_pieces
        while goes_on():
            num_pieces += 1
            has_begun.set()
        return ""

    monkeypatch.setattr(module, "file_digest", endless)
    check = WeightsCheck(directory, is_random=False)
    assert has_begun.wait(60)
    check.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # returns, because its threads have ended
    assert num_pieces
