"""The random plans of the GPU's tests keep the rules of plans, whatever their seed, and however late results are."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from executor.plans.limits import PlanLimits
from executor.plans.plan import StepOutput, StepTimings
from executor.slots.slots import Slots
from executor.slots.step_inputs import begin_step
from tests.support.cuda.random_streams import RandomStream

VOCAB_SIZE = 293
NUM_STEPS = 40


@pytest.mark.parametrize("max_num_batched_tokens", [9, 48])
@pytest.mark.parametrize("num_ahead", [1, 3])
def test_plans_of_any_seed_are_accepted(num_ahead: int, max_num_batched_tokens: int) -> None:
    """Nine tokens are fewer than the prompts have: sequences wait for their rows, and sample later."""
    limits = PlanLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=128,
        block_size=4,
        num_blocks=100,
        max_num_seqs=6,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    for seed in range(30):
        stream, slots, late = RandomStream(limits, seed), Slots(limits), deque[StepOutput]()
        tokens = np.random.default_rng(seed)
        for _ in range(NUM_STEPS):
            plan = stream.plan()
            slots.apply(plan)
            step = begin_step(slots, plan.forks)
            sampled = tokens.integers(0, VOCAB_SIZE, len(step.sampling), dtype=np.int32)
            token_ids, reasons = np.zeros(len(step.reporting), np.int32), np.zeros(len(step.reporting), np.uint8)
            places = np.searchsorted(step.reporting, step.sampling)
            token_ids[places], reasons[places] = sampled, slots.append(step.sampling, sampled)
            late.append(StepOutput(plan.epoch, plan.step_id, token_ids, reasons, StepTimings(0, 0, 0)))
            if len(late) == num_ahead:
                stream.learn(late.popleft())
