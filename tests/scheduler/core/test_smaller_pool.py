"""An executor comes back with a smaller pool: who goes on, who ends, and with what."""

from dataclasses import replace

import pytest

from scheduler.core import BeamParams, FinishReason, Request, SchedulerLimits
from tests.support.core.letters import VOCAB_SIZE, make_request
from tests.support.core.rig import Rig

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)


def build_rig() -> Rig:
    """With room for max_model_len."""
    rig = Rig(LIMITS, num_blocks=1 + 5, block_size=4, vocab_size=VOCAB_SIZE)
    rig.attach()
    return rig


def test_a_smaller_pool_fails_those_that_can_no_longer_fit() -> None:
    rig = build_rig()
    rig.add(make_request(1, "abc", 16, seeds=range(2)))
    rig.add(make_request(2, "abc", 5))
    rig.schedule()
    rig.commit()
    rig.lose()
    rig.attach(num_blocks=1 + 2)
    assert rig.clients.ended == {(1, 0): FinishReason.CAPACITY, (1, 1): FinishReason.CAPACITY}
    rig.run()


def lose_after(request: Request, num_steps: int, num_usable_blocks: int) -> Rig:
    """An executor is lost under a request, and the next one has a smaller pool."""
    rig = build_rig()
    rig.add(request)
    for _ in range(num_steps):
        rig.schedule()
        rig.commit()
    rig.lose()
    rig.attach(num_blocks=1 + num_usable_blocks)
    return rig


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_what_named_no_bound_gets_that_of_a_smaller_pool(num_steps: int) -> None:
    rig = lose_after(make_request(1, "abc", 17, is_open_ended=True), num_steps, 2)
    assert not rig.clients.ended
    rig.run()
    assert rig.clients.ended == {(1, 0): FinishReason.LENGTH}
    assert len(rig.clients.received[1, 0]) == 2 * 4 + 1 - 3


def test_what_has_got_all_that_a_smaller_pool_leaves_has_ended() -> None:
    """Two samples of 10 and of 9 tokens; 9 are left. What clients have got stays true."""
    rig = lose_after(make_request(1, "abc", 17, is_open_ended=True, seeds=range(2)), 7, 2)
    assert rig.clients.ended == {(1, 0): FinishReason.LENGTH, (1, 1): FinishReason.LENGTH}
    assert [len(tokens) for tokens in rig.clients.received.values()] == [7, 6]
    rig.assert_idle()


def test_a_bound_that_a_smaller_pool_gave_stays() -> None:
    """So that a request ends after as many steps as it could take when it came, however often pools change."""
    rig = lose_after(make_request(1, "abc", 17, is_open_ended=True), 1, 2)
    rig.lose()
    rig.attach(num_blocks=1 + 5)
    rig.run()
    assert len(rig.clients.received[1, 0]) == 6


@pytest.mark.parametrize(
    ("prompt", "min_tokens", "num_steps"), [("abcdefghi", 0, 0), ("abcdefghi", 0, 1), ("abc", 7, 0), ("abc", 9, 7)]
)
def test_what_named_no_bound_fails_if_a_smaller_pool_has_no_room_for_the_least(
    prompt: str, min_tokens: int, num_steps: int
) -> None:
    """The prompt and one token; the tokens that have to come. But a prompt that has got its token has ended well."""
    request = make_request(1, prompt, 20 - len(prompt), is_open_ended=True)
    least = replace(request.params, min_total_tokens=len(prompt) + min_tokens)
    rig = lose_after(replace(request, params=least), num_steps, 2)
    has_enough = prompt == "abcdefghi" and num_steps
    assert rig.clients.ended == {(1, 0): FinishReason.LENGTH if has_enough else FinishReason.CAPACITY}


def test_beams_that_named_no_bound_end_with_that_of_a_smaller_pool() -> None:
    rig = lose_after(make_request(1, "abc", 17, is_open_ended=True, beam=BeamParams(1, 1)), 5, 2)
    rig.run()
    assert rig.clients.ended == {(1, 0): FinishReason.LENGTH}
    assert len(rig.clients.beams[1][0].token_ids) == 6
