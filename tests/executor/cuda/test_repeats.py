"""The same plans give the same bits each time: a race would show as a difference between repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.cuda.comparison import assert_same
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE

if TYPE_CHECKING:
    from executor.plans.plan import StepOutput, StepPlan
    from tests.support.cuda.runner_pair import Pair

ON_GPU = DEVICE.type == "cuda"
NUM_REPEATS, NUM_STEPS = (200, 60) if ON_GPU else (2, 15)

pytestmark = pytest.mark.timeout(900)


def record(both: Pair) -> tuple[list[StepPlan], list[StepOutput]]:
    """Returns the plans of a random stream, and their results, taken step by step."""
    stream = RandomStream(both.reference.limits, seed=48)
    plans, outputs = [], []
    for _ in range(NUM_STEPS):
        plans.append(stream.plan())
        outputs.append(both.cuda.execute(plans[-1]).finish())
        stream.learn(outputs[-1])
    assert min(stream.seen[kind] for kind in ("row", "row of a prompt", "fork", "copy")) > 0
    return plans, outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if ON_GPU else ["float32"])
def test_a_mixed_stream_repeats_bit_by_bit(dtype, pair) -> None:
    """The first run waits for each step. In the repeats all plans are in flight at once, which gives races a chance."""
    settings = {"max_num_seqs": 20, "num_blocks": 400} if ON_GPU else {}
    both = pair("llama-biases", dtype=dtype, **settings)
    both.cuda.reset()
    both.fill_pool(0.0)
    plans, outputs = record(both)
    pool = both.pool()
    assert (pool != 0).any()
    for _ in range(NUM_REPEATS):
        both.cuda.reset()
        both.fill_pool(0.0)
        launched = [both.cuda.execute(plan) for plan in plans]
        for step, expected in zip(launched, outputs, strict=True):
            assert_same(step.finish(), expected)
        assert torch.equal(both.pool().view(torch.uint8), pool.view(torch.uint8))
