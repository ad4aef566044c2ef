"""The digest of a model's weights: equal for equal files, different for other weights."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.checkpoints.digest import weights_digest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("llama").directory, tmp_path / "model")


def test_a_copy_has_the_same_digest_and_random_weights_another(directory: Path, tmp_path: Path) -> None:
    digest = weights_digest(directory, is_random=False)
    assert len(digest) == 64
    assert weights_digest(shutil.copytree(directory, tmp_path / "copy"), is_random=False) == digest
    assert weights_digest(directory, is_random=True) not in (digest, "")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    assert weights_digest(directory, is_random=True), "random weights need no files"


def test_other_weights_have_another_digest(directory: Path) -> None:
    """Every tensor changes, as in training, but no name and no shape."""
    before = weights_digest(directory, is_random=False)
    (path,) = directory.glob("*.safetensors")
    save_file({name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in load_file(path).items()}, path)
    assert weights_digest(directory, is_random=False) != before


@pytest.mark.parametrize("is_random", [False, True])
def test_another_configuration_has_another_digest(directory: Path, is_random: bool) -> None:
    before = weights_digest(directory, is_random=is_random)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert weights_digest(directory, is_random=is_random) != before
