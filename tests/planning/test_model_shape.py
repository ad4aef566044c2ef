"""Weights and KV of five published models, computed by hand from the numbers of their config.json.

The totals are those of the publishers' checkpoints: the sum over their tensors, with a tied head counted once.
"""

from typing import Any

import pytest

from planning.config_file import parse_model_shape
from planning.errors import PlanningError
from planning.known_models import KNOWN_MODELS
from planning.model_shape import ModelShape
from tests.support.planning.configs import LLAMA_3_1_8B, QWEN_3_0_6B

LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_2_5_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def shape(config: dict[str, Any]) -> ModelShape:
    return parse_model_shape(config, "a model")


def test_sizes_of_llama_2_7b() -> None:
    model = shape(LLAMA_2_7B)
    table = 32_000 * 4_096  # 131,072,000: once for the embedding, once for the head
    attention = 4 * 4_096 * 4_096  # queries, keys, values and output have the same number of heads
    mlp = 3 * 4_096 * 11_008
    norms = 2 * 4_096
    total = 2 * table + 32 * (attention + mlp + norms) + 4_096
    assert total == 6_738_415_616
    assert model.num_parameters == total
    # keys and values, 32 layers, 32 heads of 4096 / 32 = 128 numbers of 2 bytes: half a MiB per token
    assert 2 * model.num_device_kv_values() == 2 * 32 * 32 * 128 * 2 == 524_288


def test_sizes_of_llama_3_1_8b() -> None:
    model = shape(LLAMA_3_1_8B)
    table = 128_256 * 4_096
    query_and_output = 2 * 4_096 * 4_096
    key_and_value = 2 * 4_096 * (8 * 128)
    mlp = 3 * 4_096 * 14_336
    total = 2 * table + 32 * (query_and_output + key_and_value + mlp + 2 * 4_096) + 4_096
    assert total == 8_030_261_248
    assert model.num_parameters == total
    assert 2 * model.num_device_kv_values() == 2 * 32 * 8 * 128 * 2 == 131_072
    # a step reads everything but the embedding table, 2 bytes per number: 15.0 GB
    assert 2 * model.num_read_parameters() == 2 * (total - table) == 15_009_857_536 - 8_192


def test_sizes_of_llama_3_70b_on_eight_devices() -> None:
    model = shape(LLAMA_3_70B)
    table = 128_256 * 8_192
    query_and_output = 2 * 8_192 * (64 * 128)
    key_and_value = 2 * 8_192 * (8 * 128)
    mlp = 3 * 8_192 * 28_672
    total = 2 * table + 80 * (query_and_output + key_and_value + mlp + 2 * 8_192) + 8_192
    assert total == 70_553_706_496
    assert model.num_parameters == total
    # an eighth of every matrix and of the head (128,256 / 8 = 16,032); the embedding and each norm on every device
    whole = 80 * 2 * 8_192 + 8_192 + table
    assert model.num_device_parameters(8) == (total - whole) // 8 + whole == 9_739_706_368
    # one of 8 kv heads: 40 KB per token and GPU, where a KB is 1,024 bytes
    kv_bytes = 2 * 80 * 1 * 128 * 2
    assert kv_bytes == 40 * 1_024 == 40_960
    assert 2 * model.num_device_kv_values(8) == kv_bytes
    # 128k tokens: 5 GB where k, and the GB, are powers of 1,024; 5.37 GB in powers of 1,000
    assert 128 * 1_024 * kv_bytes == 5 * 2**30 == 5_368_709_120


def test_qwen_2_5_7b_has_biases_on_queries_keys_and_values() -> None:
    model = shape(QWEN_2_5_7B)
    table = 152_064 * 3_584
    query_and_output = 2 * 3_584 * (28 * 128)
    key_and_value = 2 * 3_584 * (4 * 128)
    biases = 28 * 128 + 2 * 4 * 128
    mlp = 3 * 3_584 * 18_944
    total = 2 * table + 28 * (query_and_output + key_and_value + biases + mlp + 2 * 3_584) + 3_584
    assert total == 7_615_616_512
    assert model.num_parameters == total
    assert 2 * model.num_device_kv_values() == 2 * 28 * 4 * 128 * 2 == 57_344  # 56 KiB


def test_qwen_3_0_6b_has_a_tied_head_norms_of_heads_and_wide_heads() -> None:
    model = shape(QWEN_3_0_6B)
    table = 151_936 * 1_024
    query_and_output = 2 * 1_024 * (16 * 128)  # 2,048 wide: head_dim is not 1024 / 16
    key_and_value = 2 * 1_024 * (8 * 128)
    mlp = 3 * 1_024 * 3_072
    norms = 2 * 1_024 + 2 * 128
    total = table + 28 * (query_and_output + key_and_value + mlp + norms) + 1_024
    assert total == 596_049_920
    assert model.num_parameters == total
    assert model.num_read_parameters() == total  # the table is also the head, so every step reads it
    assert 2 * model.num_device_kv_values() == 2 * 28 * 8 * 128 * 2 == 114_688  # 112 KiB


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama-2-7b", LLAMA_2_7B),
        ("llama-3.1-8b", LLAMA_3_1_8B),
        ("llama-3-70b", LLAMA_3_70B),
        ("qwen2.5-7b", QWEN_2_5_7B),
        ("qwen3-0.6b", QWEN_3_0_6B),
    ],
)
def test_known_models_match_their_config(name: str, config: dict[str, Any]) -> None:
    assert KNOWN_MODELS[name] == parse_model_shape(config, name)


def test_known_models_have_the_published_number_of_parameters() -> None:
    assert KNOWN_MODELS["mistral-7b"].num_parameters == 7_241_732_096
    assert KNOWN_MODELS["qwen3-8b"].num_parameters == 8_190_735_360
    assert KNOWN_MODELS["llama-3.1-70b"].num_parameters == 70_553_706_496


def test_biases_are_counted() -> None:
    plain = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
    biased = shape(plain | {"attention_bias": True, "mlp_bias": True})
    queries, keys_and_values, output = 8, 2 * 4, 8
    gate_and_up, down = 2 * 12, 8
    added = 3 * (queries + keys_and_values + output + gate_and_up + down)
    assert biased.num_parameters - shape(plain).num_parameters == added


def test_kv_heads_are_replicated_on_more_devices() -> None:
    """Four kv heads are shared by eight devices with copies."""
    model = shape(QWEN_2_5_7B | {"num_attention_heads": 32, "head_dim": 128, "intermediate_size": 16_384})
    assert [model.num_device_kv_heads(n) for n in (1, 2, 4, 8, 16)] == [4, 2, 1, 1, 1]
    assert model.num_device_kv_values(8) == model.num_device_kv_values(4)
    model.check_tensor_parallel(8)


@pytest.mark.parametrize(
    ("change", "size", "what"),
    [
        ({}, 29, "28 attention heads"),
        ({"intermediate_size": 7}, 8, "7 MLP columns"),
        ({"vocab_size": 7}, 8, "7 tokens of the vocabulary"),
    ],
)
def test_a_device_without_work_is_refused(change: dict[str, int], size: int, what: str) -> None:
    with pytest.raises(PlanningError, match=what):
        shape(QWEN_2_5_7B | change).check_tensor_parallel(size)


def test_the_figures_are_those_of_the_device_with_the_most() -> None:
    """Four devices hold 1, 2, 1 and 2 of six kv heads; ten hold 1 each, four of them with half of its four queries."""
    model = shape(LLAMA_3_1_8B | {"num_attention_heads": 24, "num_key_value_heads": 6, "hidden_size": 3072})
    assert [(share.num_kv_heads, share.num_heads) for share in model.shares(4)] == [(1, 4), (2, 8), (1, 4), (2, 8)]
    assert model.num_device_kv_heads(4) == 2
    assert [share.num_heads for share in model.shares(10)] == [4, 2, 2, 2, 2, 4, 2, 2, 2, 2]
    assert model.attention_flops(1, 10) == model.attention_flops(1, 6)


def test_biases_behind_a_sum_are_on_one_device() -> None:
    plain = LLAMA_3_1_8B | {"num_hidden_layers": 3}
    biased = shape(plain | {"attention_bias": True, "mlp_bias": True})
    first, second = biased.shares(2)
    assert biased.num_share_parameters(first) - biased.num_share_parameters(second) == 3 * 2 * biased.hidden_size


def test_the_share_of_a_vocabulary_is_rounded_up() -> None:
    model = shape(LLAMA_3_1_8B | {"vocab_size": 128_257})
    head = model.num_head_parameters(2)
    assert head == 64_129 * 4_096
