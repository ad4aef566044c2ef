"""Random weights have the shapes of config.json and need no other file of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from executor.checkpoints.model_config import read_model_config
from executor.checkpoints.random_weights import RandomCheckpoint
from executor.config import ExecutorConfig
from executor.errors import ConfigError
from executor.models.weights import expected_shapes
from tests.support.executor.plan_driver import generate

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture
def only_config(checkpoint, tmp_path) -> Path:
    (tmp_path / "config.json").write_text((checkpoint("qwen3").directory / "config.json").read_text())
    return tmp_path


def test_random_weights_generate_from_config_json_alone(only_config, make_runner) -> None:
    one, again = (make_runner(only_config, load_format="random") for _ in range(2))
    tokens = generate(one, [[5, 6, 7]], 8)
    assert len(tokens[0]) == 8
    assert tokens == generate(again, [[5, 6, 7]], 8)


def test_the_configured_dtype_is_used(only_config, make_runner) -> None:
    runner = make_runner(only_config, load_format="random", dtype="bfloat16")
    assert generate(runner, [[5]], 2)
    assert runner.model.pool.dtype == torch.bfloat16


def test_norms_are_ones_and_other_weights_are_normal(only_config) -> None:
    shapes = expected_shapes(read_model_config(only_config))
    weights = RandomCheckpoint(shapes, torch.float32, CPU)
    assert weights.names == set(shapes)
    for name, shape in shapes.items():
        tensor = weights.tensor(name)
        assert tensor.shape == shape
        assert (tensor == 1).all() if "norm" in name else tensor.std() == pytest.approx(0.02, rel=0.1)
    first, second = (weights.tensor(f"model.layers.{i}.mlp.up_proj.weight") for i in range(2))
    assert not torch.equal(first, second)


def test_an_unknown_load_format_is_rejected() -> None:
    with pytest.raises(ConfigError, match="load_format: must be one of safetensors, random, is 'pickle'"):
        ExecutorConfig(model="m", load_format="pickle")
