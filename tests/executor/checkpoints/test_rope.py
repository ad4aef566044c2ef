"""Rotary tables against transformers' frequencies, and against their own definition at single positions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from executor.checkpoints.model_config import parse_model_config
from executor.checkpoints.rope import DefaultRope, DynamicNtkRope, LinearRope, LongRope
from executor.errors import CheckpointError

HEAD_DIM = 16
REACH = 64
FACTORS = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0]

SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-details": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "longrope": {
        "factor": 2.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 32,
    },
}


def rope_and_oracle(name: str):
    parameters = {"rope_type": name.split("-")[0], "rope_theta": 5000.0, **SCALINGS[name]}
    oracle_config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=REACH, rope_parameters=dict(parameters)
    )
    ours = parse_model_config({**oracle_config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    return ours, LlamaRotaryEmbedding(oracle_config)


def oracle_tables(oracle, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = oracle(torch.zeros(1), positions.unsqueeze(0))
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name) -> None:
    rope, oracle = rope_and_oracle(name)
    cos, sin = rope.tables(HEAD_DIM, REACH)
    assert cos.shape == sin.shape == (REACH, HEAD_DIM // 2)
    expected_cos, expected_sin = oracle_tables(oracle, torch.arange(REACH))
    torch.testing.assert_close(cos, expected_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin, rtol=0, atol=1e-6)


def test_longrope_uses_the_short_set_within_the_original_length() -> None:
    rope, oracle = rope_and_oracle("longrope")
    short_cos, _ = rope.tables(HEAD_DIM, 32)
    torch.testing.assert_close(short_cos, oracle_tables(oracle, torch.arange(32))[0], rtol=0, atol=1e-6)
    assert not torch.equal(short_cos, rope.tables(HEAD_DIM, 33)[0][:32])


def test_dynamic_positions_are_turned_as_last_tokens() -> None:
    rope, _ = rope_and_oracle("dynamic")
    cos, sin = rope.tables(HEAD_DIM, 2 * REACH)
    for position in (0, REACH - 1, REACH, REACH + 1, 2 * REACH - 1):
        _, oracle = rope_and_oracle("dynamic")
        expected_cos, expected_sin = oracle_tables(oracle, torch.arange(position + 1))
        torch.testing.assert_close(cos[position], expected_cos[-1], rtol=0, atol=2e-5)
        torch.testing.assert_close(sin[position], expected_sin[-1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", sorted(SCALINGS.keys() - {"longrope"}))  # which chooses by the length of the table
def test_a_position_does_not_depend_on_the_table_length(name) -> None:
    rope, _ = rope_and_oracle(name)
    few, many = rope.tables(HEAD_DIM, 50), rope.tables(HEAD_DIM, 120)
    assert torch.equal(few[0], many[0][:50])
    assert torch.equal(few[1], many[1][:50])


@pytest.mark.parametrize(
    "rope",
    [
        DefaultRope(1e-44, REACH),
        LinearRope(5000.0, 1e-44, REACH),
        DynamicNtkRope(1e-44, 2.0, REACH),
        LongRope(5000.0, (1e-44,) * 8, (1.0,) * 8, REACH, REACH, 1.0),
    ],
)
def test_angles_that_overflow_are_rejected(rope) -> None:
    with pytest.raises(CheckpointError, match="angles that are not finite"):
        rope.tables(HEAD_DIM, REACH)
