"""The meaning of config.json, and the fields that are rejected because the decoder does not implement them."""

from __future__ import annotations

import math

import pytest

from executor.checkpoints.model_config import parse_model_config
from executor.checkpoints.rope import DefaultRope, DynamicNtkRope, LinearRope, Llama3Rope, LongRope, YarnRope
from executor.errors import CheckpointError
from planning.config_file import parse_model_shape
from tests.support.executor.model_configs import BASE


def parse(**changes: object):
    content = {**BASE, **changes}
    return parse_model_config({name: value for name, value in content.items() if value is not ...})


def test_missing_fields_take_the_defaults_of_the_architecture() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.tie_word_embeddings, config.qkv_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert (config.windows, config.dtype) == ((0, 0, 0, 0), None)
    assert config.rope == DefaultRope(10000.0, 256)


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "qkv_bias", "output_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False, False, False),
        ("LlamaForCausalLM", True, True, True, False),
        ("MistralForCausalLM", True, False, False, False),
        ("Qwen2ForCausalLM", False, True, False, False),
        ("Qwen3ForCausalLM", False, False, False, True),
        ("Qwen3ForCausalLM", True, True, True, True),
    ],
)
def test_biases_depend_on_the_architecture_and_attention_bias(
    architecture, attention_bias, qkv_bias, output_bias, qk_norm
) -> None:
    config = parse(architectures=[architecture], attention_bias=attention_bias)
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (qkv_bias, output_bias, qk_norm)


@pytest.mark.parametrize(
    ("architecture", "absent", "null"),
    [("LlamaForCausalLM", 64, 64), ("MistralForCausalLM", 8, 64), ("Qwen2ForCausalLM", 32, 64)],
)
def test_the_number_of_kv_heads_has_the_default_of_the_class(architecture: str, absent: int, null: int) -> None:
    """Transformers has the same. `quire plan` reads the field, too."""
    fields = {"architectures": [architecture], "num_attention_heads": 64, "hidden_size": 1024}
    for value, expected in ((..., absent), (None, null), (16, 16)):
        changed = fields | {"num_key_value_heads": value}
        content = {name: each for name, each in (BASE | changed).items() if each is not ...}
        assert parse(**changed).num_kv_heads == parse_model_shape(content, "").num_kv_heads == expected


@pytest.mark.parametrize("fields", [{"dtype": None}, {}, {"dtype": "bfloat16", "torch_dtype": "float16"}])
def test_the_dtype_is_read_in_both_spellings(fields) -> None:
    content = BASE | {"torch_dtype": "bfloat16"} | fields
    assert parse(**content).dtype == parse_model_shape(content, "").dtype == "bfloat16"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_only_llama_reads_mlp_bias(architecture: str) -> None:
    content = BASE | {"architectures": [architecture], "mlp_bias": True}
    has_bias = architecture == "LlamaForCausalLM"
    assert parse(**content).mlp_bias is has_bias
    assert parse_model_shape(content, "").mlp_bias is has_bias


def test_model_type_replaces_missing_architectures() -> None:
    assert parse(architectures=..., model_type="qwen3").architecture == "Qwen3ForCausalLM"
    assert parse(architectures=..., model_type="qwen3").head_dim == 128


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 256}, (0, 0, 0, 0)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": None}, (0, 0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 9,
                "layer_types": ["full_attention", *["sliding_attention"] * 3],
            },
            (0, 9, 9, 9),
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, (0, 0, 0, 0)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (0, 0, 0, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, 0, 9, 0),
        ),
    ],
)
def test_windows_are_read_for_each_layer(fields, windows) -> None:
    assert parse(**fields).windows == windows


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2] * 8}


@pytest.mark.parametrize(
    ("scaling", "rope", "max_context_len"),
    [
        (None, DefaultRope(5e5, 256), 256),
        ({"type": "default"}, DefaultRope(5e5, 256), 256),
        ({"type": "linear", "factor": 2}, LinearRope(5e5, 2.0, 256), 512),
        ({"rope_type": "dynamic", "factor": 4.0}, DynamicNtkRope(5e5, 4.0, 256), 1024),
        ({"rope_type": "llama3", **LLAMA3}, Llama3Rope(5e5, 8.0, 1.0, 4.0, 64, 256), 256),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
            YarnRope(5e5, 4.0, 256, 256, 1.5),
            1024,
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": None},
            YarnRope(5e5, 4.0, 64, 256, 0.1 * math.log(4.0) + 1, truncate=False),
            256,
        ),
        (
            {**LONGROPE, "original_max_position_embeddings": 64, "attention_factor": 1.25},
            LongRope(5e5, (1.0,) * 8, (2.0,) * 8, 64, 256, 1.25),
            256,
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_scalings_are_read_in_both_spellings(spelling, scaling, rope, max_context_len) -> None:
    if spelling == "rope_scaling":
        found = parse(rope_theta=5e5, rope_scaling=scaling).rope
    else:
        found = parse(rope_parameters={"rope_theta": 5e5, **(scaling or {})}).rope
    assert found == rope
    assert found.max_context_len == max_context_len


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            "rope_scaling: differs from rope_parameters",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is not supported; known: Llama",
        ),
        ({"architectures": ..., "model_type": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"architectures": ...}, "architecture None is not supported"),
        ({"model_type": "mistral"}, "model_type: 'mistral' is not that of LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "is not supported"),
        ({"hidden_size": ...}, "hidden_size: missing"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer, found '64'"),
        ({"vocab_size": 0}, "vocab_size: expected a positive integer, found 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: "),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "other angles for each kind of layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        ({"sliding_window": 255}, "sliding_window: 255 is not supported for this architecture; null means none"),
        ({"attention_chunk_size": 64}, "attention_chunk_size: 64 is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: sliding_attention without a"),
        ({"is_causal": False}, "is_causal: False is not supported"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key-value heads"),
        ({"architectures": ..., "model_type": ["llama"]}, "architecture ['llama'] is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture ['LlamaForCausalLM'] is not supported"),
        ({"head_dim": 15}, "head_dim: must be even"),
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings: expected at most 2147483647, found"),
        ({"vocab_size": 10**400}, "vocab_size: expected at most 2147483647, found"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a number from 0 to 3.4e+38, found"),
        ({"rope_theta": 0}, "rope_theta: expected a positive number, found 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_parameters.factor: expected a positive number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.0}}, "rope_parameters.factor: expected a positive number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim: must be above 2 for"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "factor": 0}}, "rope_parameters.factor: expected a positive"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 0}}, "low_freq_factor: expected a positive"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_parameters.factor: expected a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta: must not be 1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1e308}},
            "rope_parameters.factor: expected a number from 0 to 3.4e+38",
        ),
        (
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings: must be above 1",
        ),
        ({"rope_scaling": {**LONGROPE, "long_factor": [10**400] * 8}}, "long_factor: expected a list of positive"),
        ({"rope_scaling": {"type": "su"}}, "rope scaling 'su' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor: missing"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "need 8 numbers",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "layer_types: chunked_attention is not supported",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types: 1 entries for 4 layers",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "sliding_attention without a sliding_window in use",
        ),
    ],
)
def test_unsupported_fields_are_rejected(fields, message) -> None:
    with pytest.raises(CheckpointError) as error:
        parse(**fields)
    assert message in str(error.value)
