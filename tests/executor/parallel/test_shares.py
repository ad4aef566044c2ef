"""The shares of all ranks make up the model, and every head has the keys and values that it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor.checkpoints.checkpoint import Checkpoint
from executor.checkpoints.model_config import ModelConfig, parse_model_config
from executor.checkpoints.random_weights import RandomCheckpoint
from executor.checkpoints.shares import Share, Span, share_of
from executor.config import ExecutorConfig
from executor.device.device import resolve_num_threads
from executor.errors import ConfigError
from executor.loading import check_divisible
from tests.support.executor.model_configs import BASE

WHOLE = parse_model_config(BASE)


def model(num_heads: int, num_kv_heads: int, intermediate_size: int = 64, vocab_size: int = 101) -> ModelConfig:
    return replace(
        WHOLE,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )


def shares(config: ModelConfig, size: int) -> list[Share]:
    return [share_of(config, rank, size) for rank in range(size)]


def joined(spans: list[Span]) -> list[int]:
    return [index for span in spans for index in range(span.start, span.stop)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_shares_make_up_the_model(num_kv_heads: int, group: int) -> None:
    config = model(num_kv_heads * group, num_kv_heads)
    for size in range(1, config.num_heads + 1):
        all_shares = shares(config, size)
        assert joined([share.heads for share in all_shares]) == list(range(config.num_heads))
        assert joined([share.intermediate for share in all_shares]) == list(range(64))
        assert joined([share.vocab for share in all_shares]) == list(range(101))
        assert {*joined([share.kv_heads for share in all_shares])} == set(range(num_kv_heads))
        for share in all_shares:
            own = share.of(config)
            assert min(own.num_heads, own.num_kv_heads, own.intermediate_size) >= 1
            assert own.num_heads % own.num_kv_heads == 0, "kernels need as many queries for each head of keys"
            own_group = own.num_heads // own.num_kv_heads
            for index, head in enumerate(range(share.heads.start, share.heads.stop)):
                assert share.kv_heads.start + index // own_group == head // group


def test_heads_are_replicated_only_if_there_are_more_ranks() -> None:
    config = model(16, 4)
    assert joined([share.kv_heads for share in shares(config, 4)]) == [0, 1, 2, 3]
    assert joined([share.kv_heads for share in shares(config, 8)]) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_sizes_that_divide_are_divided_evenly() -> None:
    for size in (2, 4, 8):
        assert {
            (len(share.heads), len(share.kv_heads), len(share.intermediate)) for share in shares(model(32, 8), size)
        } == {(32 // size, 8 // size, 64 // size)}


def test_parts_of_a_checkpoint_are_parts_of_its_tensors(checkpoint) -> None:
    source = Checkpoint(checkpoint("llama").directory)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = source.tensor(name)
    assert torch.equal(source.part(name, Span(3, 17), None), whole[3:17])
    assert torch.equal(source.part(name, None, Span(5, 61)), whole[:, 5:61])
    assert torch.equal(source.part("model.norm.weight", Span(2, 9), None), source.tensor("model.norm.weight")[2:9])


def test_random_weights_do_not_depend_on_the_division() -> None:
    source = RandomCheckpoint({"a.weight": (12, 8)}, torch.float32, torch.device("cpu"))
    whole = source.tensor("a.weight")
    assert torch.equal(source.part("a.weight", Span(3, 7), None), whole[3:7])
    assert torch.equal(source.part("a.weight", None, Span(1, 8)), whole[:, 1:8])


def test_more_than_one_rank_on_a_gpu_is_refused(checkpoint) -> None:
    directory = checkpoint("llama").directory
    config = ExecutorConfig(model=str(directory), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size: ranks compute on CPUs only, and the device is cuda:0"):
        check_divisible(config, directory, torch.device("cuda", 0))


@pytest.mark.parametrize("size", [0, -1])
def test_a_number_of_ranks_below_one_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: must be at least 1, is {size}"):
        ExecutorConfig(model="m", tensor_parallel_size=size)


def test_ranks_divide_the_threads() -> None:
    assert [resolve_num_threads(8, size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]


def test_only_the_first_rank_leads() -> None:
    assert [share.is_leading for share in shares(model(8, 2), 4)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("config", "size", "named"),
    [
        (model(4, 2), 5, "5 ranks cannot share 4 attention heads"),
        (model(8, 2, intermediate_size=3), 4, "4 ranks cannot share 3 columns of the MLP"),
        (model(8, 2, vocab_size=3), 4, "4 ranks cannot share 3 tokens of the vocabulary"),
    ],
)
def test_a_rank_without_work_is_refused(config: ModelConfig, size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {named}"):
        share_of(config, 0, size)
