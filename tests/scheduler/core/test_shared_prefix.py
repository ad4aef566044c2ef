"""Requests that arrive together with one new prefix: it is computed once, and no request waits longer for it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.core import BeamParams, Request, SchedulerLimits, SequenceParams
from scheduler.core.fairness.fair_queue import MAX_SET_ASIDE
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import make_request
from tests.support.core.small_harness import build_harness

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


LONG = "a" * 90


def started(harness: Harness) -> set[int]:
    """Plans and commits a step; returns the requests that it admitted."""
    assert harness.schedule() is not None
    admitted = {sequence.request.request_id for sequence, _ in harness.scheduler.state.in_flight[-1].admitted}
    harness.commit()
    return admitted


def test_copies_of_a_prompt_of_several_steps_are_overtaken_and_computed_once() -> None:
    harness = build_harness(make_request(1, LONG, 1), max_num_seqs=8, num_usable_blocks=400)
    assert started(harness) == {1}
    for request_id in (2, 3):
        harness.add(make_request(request_id, LONG, 1))
    for request_id, prompt in enumerate(["bcd", "cde", "def"], start=4):
        harness.add(make_request(request_id, prompt, 1))
        assert started(harness) == {request_id}, "it does not wait for the prompt that the copies wait for"
    while not (admitted := started(harness)):
        pass
    assert admitted == {2, 3}, "they keep their places"
    harness.run()
    assert harness.scheduler.state.counters.num_prefilled_tokens == 90 + 2 + 3 * 3
    assert harness.coverage.num_overtaken


def test_many_copies_of_a_prompt_do_not_hold_up_another_tenant() -> None:
    """Beyond a bound, copies are not looked at, so requests of their own tenant wait behind them."""
    harness = build_harness(make_request(1, LONG, 1, tenant="a"), max_num_seqs=8, num_usable_blocks=400)
    assert started(harness) == {1}
    for request_id in range(2, 2 + MAX_SET_ASIDE):
        harness.add(make_request(request_id, LONG, 1, tenant="a"))
    harness.add(make_request(30, "bcd", 1, tenant="a"))
    harness.add(make_request(31, "bcd", 1, tenant="b"))
    assert started(harness) == {31}
    harness.run()


def test_a_place_in_the_queue_is_kept_if_a_request_is_cancelled_while_it_is_set_aside() -> None:
    harness = build_harness(make_request(1, LONG, 1, tenant="a"), num_usable_blocks=400)
    started(harness)
    harness.add(make_request(2, LONG, 1, tenant="a"))
    started(harness)
    harness.cancel(2)
    harness.add(make_request(3, "bcd", 1, tenant="a"))
    assert started(harness) == {3}
    harness.run()


def test_a_prompt_waits_only_for_a_block_that_is_being_computed() -> None:
    """A prompt whose log-probabilities are reported is computed from its first token, though its blocks are cached."""
    harness = build_harness(make_request(1, LONG[:80], 1), num_usable_blocks=400)
    while harness.scheduler.num_unfinished_requests:
        started(harness)
    request = make_request(2, LONG, 1)
    harness.add(replace(request, params=replace(request.params, num_prompt_logprobs=1)))
    assert started(harness) == {2}
    harness.add(make_request(3, LONG, 1))
    assert started(harness) == {3}, "the block that it lacks is computed five steps later"
    harness.run()


@pytest.mark.parametrize("length", [4, 5])
def test_a_sequence_that_returns_to_the_queue_does_not_wait_for_the_block_of_its_last_token(length: int) -> None:
    """It computes its last token itself, so it shares no block that ends with it. It would be overtaken for nothing."""
    prompt = (0, 1, 1, 0, 1)[:length]
    harness = Harness(SchedulerLimits(8, 64, 64), num_blocks=100, block_size=4)
    harness.attach()
    harness.add(Request(1, prompt, SequenceParams(max_total_tokens=length + 8)))
    harness.add(Request(2, prompt, SequenceParams(max_total_tokens=length + 4), beam=BeamParams(2, 1)))
    harness.schedule()
    harness.commit()
    harness.lose()  # the beams return to the queue as one sequence, with the digests of their prompt
    harness.add(Request(3, prompt, SequenceParams(max_total_tokens=length + 1)))
    harness.attach()
    harness.schedule()  # checks I13: no sequence overtakes another
    harness.run()
