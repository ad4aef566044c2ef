"""Requests that arrive together with one new prefix: it is computed once, and no request waits longer for it."""

from __future__ import annotations

import random

import pytest

from scheduler.core import SchedulerLimits
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import make_request

NUM_OUTPUT_TOKENS = 16
BLOCK_SIZE = 16


def letters(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh", k=length))


def num_tokens_computed(prompts: list[str]) -> tuple[int, int]:
    """Returns the tokens computed and the number of steps for prompts that arrive at once."""
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, max_in_flight=2)
    harness = Harness(limits, num_blocks=4000, block_size=BLOCK_SIZE, vocab_size=8)
    harness.attach()
    for request_id, prompt in enumerate(prompts):
        harness.add(make_request(request_id, prompt, NUM_OUTPUT_TOKENS))
    num_tokens = num_steps = 0
    while harness.scheduler.num_unfinished_requests:
        while (plan := harness.schedule()) is not None:
            num_tokens += plan.num_tokens
            num_steps += 1
        harness.commit()
    while harness.in_flight:
        harness.commit()
    harness.assert_idle()
    return num_tokens, num_steps


@pytest.mark.parametrize(("num_requests", "num_shared", "num_own"), [(8, 256, 32), (32, 256, 32), (32, 1024, 32)])
def test_a_prefix_is_computed_once(num_requests: int, num_shared: int, num_own: int) -> None:
    prefix = letters(num_shared, seed=0)
    prompts = [prefix + letters(num_own, seed=1 + i) for i in range(num_requests)]
    num_tokens, num_steps = num_tokens_computed(prompts)
    num_decoded = num_requests * (NUM_OUTPUT_TOKENS - 1)
    assert num_tokens == num_shared + num_requests * num_own + num_decoded
    assert num_steps <= NUM_OUTPUT_TOKENS + 4


def test_prompts_without_a_common_prefix_do_not_wait() -> None:
    prompts = [letters(60, seed=i) for i in range(32)]
    num_tokens, num_steps = num_tokens_computed(prompts)
    assert num_tokens == 32 * (60 + NUM_OUTPUT_TOKENS - 1)
    assert num_steps == NUM_OUTPUT_TOKENS
