"""Requests that arrive together with one unseen prefix: it is computed once, and nobody waits longer than that."""

from __future__ import annotations

import random

import pytest

from scheduler.core import SchedulerLimits
from tests.support.core.letters import make_request
from tests.support.core.rig import Rig

NUM_OUTPUT_TOKENS = 16
BLOCK_SIZE = 16


def letters(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh", k=length))


def num_tokens_computed(prompts: list[str]) -> tuple[int, int]:
    """Over all steps, and the number of steps, for prompts that arrive at once."""
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, max_in_flight=2)
    rig = Rig(limits, num_blocks=4000, block_size=BLOCK_SIZE, vocab_size=8)
    rig.attach()
    for request_id, prompt in enumerate(prompts):
        rig.add(make_request(request_id, prompt, NUM_OUTPUT_TOKENS))
    num_tokens = num_steps = 0
    while rig.scheduler.num_unfinished_requests:
        while (plan := rig.schedule()) is not None:
            num_tokens += plan.num_tokens
            num_steps += 1
        rig.commit()
    while rig.in_flight:
        rig.commit()
    rig.assert_idle()
    return num_tokens, num_steps


@pytest.mark.parametrize(("num_requests", "num_shared", "num_own"), [(8, 256, 32), (32, 256, 32), (32, 1024, 32)])
def test_a_prefix_is_computed_once(num_requests: int, num_shared: int, num_own: int) -> None:
    prefix = letters(num_shared, seed=0)
    prompts = [prefix + letters(num_own, seed=1 + i) for i in range(num_requests)]
    num_tokens, num_steps = num_tokens_computed(prompts)
    num_decoded = num_requests * (NUM_OUTPUT_TOKENS - 1)
    assert num_tokens == num_shared + num_requests * num_own + num_decoded
    assert num_steps <= NUM_OUTPUT_TOKENS + 4


def test_prompts_of_their_own_do_not_wait() -> None:
    prompts = [letters(60, seed=i) for i in range(32)]
    num_tokens, num_steps = num_tokens_computed(prompts)
    assert num_tokens == 32 * (60 + NUM_OUTPUT_TOKENS - 1)
    assert num_steps == NUM_OUTPUT_TOKENS
