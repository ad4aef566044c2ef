"""Beams in the scheduler: blocks counted by hand, and groups that end, restart or fail at different moments."""

import pytest

from scheduler.core import BeamParams, CapacityExceeded, FinishReason, Request, SchedulerLimits, SequenceParams
from scheduler.core.inspect.views import num_held_slots
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request, to_ids


def build_harness(num_usable_blocks: int = 60, *, max_in_flight: int = 1, max_preemptions: int = 3) -> Harness:
    limits = SchedulerLimits(8, 64, 60, max_in_flight=max_in_flight, max_preemptions=max_preemptions, watermark_ratio=0)
    harness = Harness(limits, num_blocks=num_usable_blocks + 1, block_size=4, vocab_size=VOCAB_SIZE)
    harness.attach()
    return harness


def step(harness: Harness) -> None:
    harness.schedule()
    harness.commit()


def num_in_use(harness: Harness) -> int:
    pool = harness.scheduler.state.cache.pool
    return pool.num_usable_blocks - pool.num_free_blocks


def test_eight_samples_copy_the_block_they_share_when_they_first_write() -> None:
    """Counts the blocks of eight samples.

    The prompt of ten tokens fills two blocks and half of a third, and the samples share these three. The first token
    written makes seven copies, and the last sample writes in place: two shared blocks and eight of their own. Two
    tokens later each block is full, and each sample takes another for its next token.
    """
    harness = build_harness()
    harness.add(make_request(1, "abcdefghij", 8, seeds=range(8)))
    step(harness)
    assert num_in_use(harness) == 3
    assert sorted(harness.scheduler.state.cache.pool.ref_counts, reverse=True)[:4] == [8, 8, 8, 0]
    counters = harness.scheduler.state.counters
    assert counters.num_cow_copies == 0
    step(harness)
    assert num_in_use(harness) == 2 + 8
    assert sorted(harness.scheduler.state.cache.pool.ref_counts, reverse=True)[:11] == [8, 8, *[1] * 8, 0]
    assert counters.num_cow_copies == 7
    step(harness)
    assert num_in_use(harness) == 2 + 8
    step(harness)
    assert num_in_use(harness) == 2 + 8 + 8
    assert counters.num_cow_copies == 7, "no partly filled block is shared any more"
    harness.run()


def test_four_beams_copy_the_block_they_share_when_they_first_write() -> None:
    """The prompt takes three blocks until the candidates arrive; then three beams copy, and one writes in place."""
    harness = build_harness()
    harness.add(make_request(1, "abcdefghij", 9, beam=BeamParams(4, 4)))
    step(harness)
    assert num_in_use(harness) == 3
    assert num_held_slots(harness.scheduler.state) == 3
    harness.schedule()
    assert num_in_use(harness) == 2 + 4
    assert harness.scheduler.state.counters.num_cow_copies == 3
    assert num_held_slots(harness.scheduler.state) == 0
    harness.commit()
    harness.run()


@pytest.mark.parametrize("when", ["waiting", "first step in flight", "decided", "branches in flight"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "loss"])
def test_a_group_can_end_at_any_moment(when: str, how: str) -> None:
    harness = build_harness(max_in_flight=2)
    harness.add(make_request(1, "abcdef", 9, beam=BeamParams(3, 2), deadline_s=5.0))
    harness.add(make_request(2, "uvw", 20))
    if when != "waiting":
        harness.schedule()
    if when in ("decided", "branches in flight"):
        harness.commit()
    if when == "branches in flight":
        harness.schedule()
    if how == "cancel":
        harness.cancel(1)
    elif how == "deadline":
        assert [reason for _, reason in harness.expire(5.0).finished] == [FinishReason.DEADLINE]
    else:
        harness.lose()
    harness.run()
    assert how != "loss" or (1, 0) in harness.clients.ended


def test_a_preempted_group_restarts_and_finds_the_same_beams() -> None:
    harness = build_harness(13)
    harness.add(make_request(1, "abcdef", 30))
    harness.add(make_request(2, "uvwxyz", 12, beam=BeamParams(3, 3)))
    harness.run()
    assert harness.scheduler.state.counters.num_preemptions > 0
    assert harness.coverage.num_preempted_beams > 0


def test_a_group_whose_beams_cannot_fit_together_is_refused() -> None:
    """Prompt 6 and output 9 take 14 tokens in four blocks, and only the first block is shared by all beams."""
    harness = build_harness(1 + 4 * 3 - 1)
    with pytest.raises(CapacityExceeded, match="4 beams may come to hold 13 blocks, the pool has 12"):
        harness.add(make_request(1, "abcdef", 9, beam=BeamParams(4, 4)))
    with pytest.raises(CapacityExceeded, match="9 sequences"):
        harness.add(make_request(1, "abcdef", 9, beam=BeamParams(9, 4)))


def test_a_smaller_pool_fails_a_group_that_no_longer_fits() -> None:
    harness = build_harness()
    harness.add(make_request(1, "abcdef", 9, beam=BeamParams(4, 4)))
    step(harness)
    harness.lose()
    assert [reason for _, reason in harness.attach(12).finished] == [FinishReason.CAPACITY]


@pytest.mark.parametrize("max_num_batched_tokens", [4, 64])
def test_prompt_logprobs_are_complete_though_another_request_computed_the_same_prompt(
    max_num_batched_tokens: int,
) -> None:
    limits = SchedulerLimits(4, max_num_batched_tokens, 60, max_in_flight=2)
    harness = Harness(limits, num_blocks=60, block_size=4, vocab_size=VOCAB_SIZE)
    harness.attach()
    prompt = to_ids("abcdefghijklm")
    for request_id in (1, 2):
        params = SequenceParams(max_total_tokens=17, num_prompt_logprobs=3, num_logprobs=2)
        harness.add(Request(request_id, prompt, params))
    harness.run()
    assert harness.clients.num_prompt_logprobs == {1: 12, 2: 12}
    assert harness.coverage.num_logprobs == 8
    assert harness.scheduler.state.counters.num_prefix_hit_tokens == 0


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    """Four prompts of 18 tokens, 16 of them common, take 18 + 3 x 2 computed tokens and one more plan."""
    harness = build_harness()
    for request_id in range(4):
        harness.add(make_request(request_id, "abcdefghijklmnop" + "qrst"[request_id] * 2, 1))
    step(harness)
    step(harness)
    assert not harness.scheduler.num_unfinished_requests
    assert harness.scheduler.state.counters.num_prefix_hit_tokens == 3 * 16
