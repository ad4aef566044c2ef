"""On the CPU, the logits of a sequence do not depend on the rest of the batch, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.executor.neighbours import logits_of


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_have_the_same_bits_alone_and_among_64_sequences(
    family: str, num_threads: int, checkpoint, make_runner
) -> None:
    source = checkpoint(family)
    settings = {"kernels": "auto", "max_num_seqs": 70, "num_blocks": 1200, "max_num_batched_tokens": 512}
    runner = make_runner(source.directory, **settings)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = logits_of(source, runner, has_neighbours=False)
        together = logits_of(source, runner, has_neighbours=True)
    finally:
        torch.set_num_threads(before)
    for step, (mine, ours) in enumerate(zip(alone, together, strict=True)):
        assert np.array_equal(mine.numpy(), ours.numpy()), f"token {step}"
