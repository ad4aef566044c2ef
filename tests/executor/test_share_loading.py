"""The share of one rank: what the kernels cannot compute is refused early, and a lack of memory is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.checkpoints.model_config import parse_model_config
from executor.config import ExecutorConfig
from executor.errors import CheckpointError, OutOfMemory
from executor.parallel.ranks import OneRank
from executor.share_loading import check_head_dim, load_share
from kernels.memory import zeros
from tests.support.executor.model_configs import BASE


@pytest.mark.parametrize(
    ("device", "head_dim", "message"),
    [
        ("cpu", 64, None),
        ("cpu", 6, "head_dim: must be a multiple of 4 on the CPU, is 6"),
        ("cuda", 256, None),
        ("cuda", 258, "head_dim: must be at most 256 on a GPU, is 258"),
    ],
)
def test_heads_that_the_kernels_cannot_compute_are_refused(device, head_dim, message) -> None:
    model, where = parse_model_config(BASE | {"head_dim": head_dim}), torch.device(device)
    check_head_dim(ExecutorConfig(model="m", kernels="reference"), model, where)
    if message is None:
        check_head_dim(ExecutorConfig(model="m"), model, where)
    else:
        with pytest.raises(CheckpointError, match=message):
            check_head_dim(ExecutorConfig(model="m"), model, where)


def test_a_rank_without_memory_for_a_step_says_so(checkpoint, monkeypatch) -> None:
    config = ExecutorConfig(model="m", num_blocks=10, max_num_seqs=3, max_num_batched_tokens=12)
    share = load_share(
        config,
        Path(checkpoint("llama").directory),
        torch.device("cpu"),
        OneRank(),
        lambda model: model,
        {},
        lambda line: None,
    )
    monkeypatch.setattr("executor.models.program.zeros", lambda *_: zeros((1 << 60,), torch.uint8))
    with pytest.raises(OutOfMemory, match="a step of 12 tokens and 3 sequences"):
        share.make_model()
