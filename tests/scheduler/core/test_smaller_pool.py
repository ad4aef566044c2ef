"""An executor returns with a smaller pool: which requests continue, and which end for which reason."""

from dataclasses import replace

import pytest

from scheduler.core import BeamParams, FinishReason, Request, SchedulerLimits
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)


def build_harness() -> Harness:
    """Returns a harness whose pool has room for max_model_len."""
    harness = Harness(LIMITS, num_blocks=1 + 5, block_size=4, vocab_size=VOCAB_SIZE)
    harness.attach()
    return harness


def test_a_smaller_pool_fails_requests_that_no_longer_fit() -> None:
    harness = build_harness()
    harness.add(make_request(1, "abc", 16, seeds=range(2)))
    harness.add(make_request(2, "abc", 5))
    harness.schedule()
    harness.commit()
    harness.lose()
    harness.attach(num_blocks=1 + 2)
    assert harness.clients.ended == {(1, 0): FinishReason.CAPACITY, (1, 1): FinishReason.CAPACITY}
    harness.run()


def lose_after(request: Request, num_steps: int, num_usable_blocks: int) -> Harness:
    """Loses the executor while a request runs, and attaches one with a smaller pool."""
    harness = build_harness()
    harness.add(request)
    for _ in range(num_steps):
        harness.schedule()
        harness.commit()
    harness.lose()
    harness.attach(num_blocks=1 + num_usable_blocks)
    return harness


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_an_open_ended_request_gets_the_bound_of_a_smaller_pool(num_steps: int) -> None:
    harness = lose_after(make_request(1, "abc", 17, is_open_ended=True), num_steps, 2)
    assert not harness.clients.ended
    harness.run()
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH}
    assert len(harness.clients.received[1, 0]) == 2 * 4 + 1 - 3


def test_a_sequence_at_the_bound_of_a_smaller_pool_has_ended() -> None:
    """Two samples have 10 and 9 tokens, and the pool leaves 9. Tokens that were sent stay valid."""
    harness = lose_after(make_request(1, "abc", 17, is_open_ended=True, seeds=range(2)), 7, 2)
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH, (1, 1): FinishReason.LENGTH}
    assert [len(tokens) for tokens in harness.clients.received.values()] == [7, 6]
    harness.assert_idle()


def test_the_bound_of_a_smaller_pool_stays_when_the_pool_grows() -> None:
    """This bounds the steps of a request however often pools change."""
    harness = lose_after(make_request(1, "abc", 17, is_open_ended=True), 1, 2)
    harness.lose()
    harness.attach(num_blocks=1 + 5)
    harness.run()
    assert len(harness.clients.received[1, 0]) == 6


@pytest.mark.parametrize(
    ("prompt", "min_tokens", "num_steps"), [("abcdefghi", 0, 0), ("abcdefghi", 0, 1), ("abc", 7, 0), ("abc", 9, 7)]
)
def test_an_open_ended_request_fails_if_its_minimum_does_not_fit(prompt: str, min_tokens: int, num_steps: int) -> None:
    """The minimum is the prompt and one token, or min_total_tokens. A request that already has its token ends well."""
    request = make_request(1, prompt, 20 - len(prompt), is_open_ended=True)
    least = replace(request.params, min_total_tokens=len(prompt) + min_tokens)
    harness = lose_after(replace(request, params=least), num_steps, 2)
    has_enough = prompt == "abcdefghi" and num_steps
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH if has_enough else FinishReason.CAPACITY}


def test_open_ended_beams_end_at_the_bound_of_a_smaller_pool() -> None:
    harness = lose_after(make_request(1, "abc", 17, is_open_ended=True, beam=BeamParams(1, 1)), 5, 2)
    harness.run()
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH}
    assert len(harness.clients.beams[1][0].token_ids) == 6
