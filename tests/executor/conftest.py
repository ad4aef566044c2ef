"""Random checkpoints and runners, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from executor.config import ExecutorConfig
from executor.device.runner import ModelRunner
from executor.loading import load_model
from tests.support.executor.checkpoints import RandomCheckpoint, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RandomCheckpoint]:
    """Returns a function that makes the checkpoint of a name in `checkpoints.FAMILIES`, once for all tests."""
    made: dict[str, RandomCheckpoint] = {}

    def get(name: str) -> RandomCheckpoint:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def make_runner() -> MakeRunner:
    """Returns a function that makes a runner for a directory, with settings of ExecutorConfig."""

    def make(directory: Path, **settings: Any) -> ModelRunner:
        defaults = {
            "kernels": "reference",
            "block_size": 4,
            "num_blocks": 200,
            "max_num_seqs": 8,
            "device": "cpu",
        }
        return load_model(ExecutorConfig(model=str(directory), **{**defaults, **settings}), lambda line: None).runner

    return make
