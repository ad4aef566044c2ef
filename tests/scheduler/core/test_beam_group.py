"""Beams in the scheduler: blocks counted by hand, and what no other moment of a group's life may break."""

import pytest

from scheduler.core import BeamParams, CapacityExceeded, FinishReason, Request, SchedulerLimits, SequenceParams
from scheduler.core.inspect.views import num_held_slots
from tests.support.core.letters import VOCAB_SIZE, make_request, to_ids
from tests.support.core.rig import Rig


def build_rig(num_usable_blocks: int = 60, *, max_in_flight: int = 1, max_preemptions: int = 3) -> Rig:
    limits = SchedulerLimits(8, 64, 60, max_in_flight=max_in_flight, max_preemptions=max_preemptions, watermark_ratio=0)
    rig = Rig(limits, num_blocks=num_usable_blocks + 1, block_size=4, vocab_size=VOCAB_SIZE)
    rig.attach()
    return rig


def step(rig: Rig) -> None:
    rig.schedule()
    rig.commit()


def num_in_use(rig: Rig) -> int:
    pool = rig.scheduler.state.cache.pool
    return pool.num_usable_blocks - pool.num_free_blocks


def test_eight_samples_copy_the_block_they_share_when_they_first_write() -> None:
    """A prompt of ten tokens: two full blocks and half of a third. Eight samples hold those three together. The first
    token written makes seven copies, the last reader writes in place: two shared blocks and eight of their own. Two
    tokens later each block is full, and the next token takes a block each."""
    rig = build_rig()
    rig.add(make_request(1, "abcdefghij", 8, seeds=range(8)))
    step(rig)
    assert num_in_use(rig) == 3
    assert sorted(rig.scheduler.state.cache.pool.ref_counts, reverse=True)[:4] == [8, 8, 8, 0]
    counters = rig.scheduler.state.counters
    assert counters.num_cow_copies == 0
    step(rig)
    assert num_in_use(rig) == 2 + 8
    assert sorted(rig.scheduler.state.cache.pool.ref_counts, reverse=True)[:11] == [8, 8, *[1] * 8, 0]
    assert counters.num_cow_copies == 7
    step(rig)
    assert num_in_use(rig) == 2 + 8
    step(rig)
    assert num_in_use(rig) == 2 + 8 + 8
    assert counters.num_cow_copies == 7, "nobody shares a block that is not full any more"
    rig.run()


def test_four_beams_copy_the_block_they_share_when_they_first_write() -> None:
    """The same prompt: three blocks until the candidates are in, then three copies, and one beam writes in place."""
    rig = build_rig()
    rig.add(make_request(1, "abcdefghij", 9, beam=BeamParams(4, 4)))
    step(rig)
    assert num_in_use(rig) == 3
    assert num_held_slots(rig.scheduler.state) == 3
    rig.schedule()
    assert num_in_use(rig) == 2 + 4
    assert rig.scheduler.state.counters.num_cow_copies == 3
    assert num_held_slots(rig.scheduler.state) == 0
    rig.commit()
    rig.run()


@pytest.mark.parametrize("when", ["waiting", "first step in flight", "decided", "branches in flight"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "loss"])
def test_a_group_can_end_at_any_moment(when: str, how: str) -> None:
    rig = build_rig(max_in_flight=2)
    rig.add(make_request(1, "abcdef", 9, beam=BeamParams(3, 2), deadline_s=5.0))
    rig.add(make_request(2, "uvw", 20))
    if when != "waiting":
        rig.schedule()
    if when in ("decided", "branches in flight"):
        rig.commit()
    if when == "branches in flight":
        rig.schedule()
    if how == "cancel":
        rig.cancel(1)
    elif how == "deadline":
        assert [reason for _, reason in rig.expire(5.0).finished] == [FinishReason.DEADLINE]
    else:
        rig.lose()
    rig.run()
    assert how != "loss" or (1, 0) in rig.clients.ended


def test_a_group_that_is_preempted_starts_again_and_finds_the_same() -> None:
    rig = build_rig(13)
    rig.add(make_request(1, "abcdef", 30))
    rig.add(make_request(2, "uvwxyz", 12, beam=BeamParams(3, 3)))
    rig.run()
    assert rig.scheduler.state.counters.num_preemptions > 0
    assert rig.coverage.num_preempted_beams > 0


def test_a_group_is_refused_that_could_not_hold_all_its_beams() -> None:
    """Prompt 6, output 9: 14 tokens in the pool at most, four blocks, of which the first is shared by all beams."""
    rig = build_rig(1 + 4 * 3 - 1)
    with pytest.raises(CapacityExceeded, match="4 beams may come to hold 13 blocks, the pool has 12"):
        rig.add(make_request(1, "abcdef", 9, beam=BeamParams(4, 4)))
    with pytest.raises(CapacityExceeded, match="9 sequences"):
        rig.add(make_request(1, "abcdef", 9, beam=BeamParams(9, 4)))


def test_a_smaller_pool_fails_a_group_that_no_longer_fits() -> None:
    rig = build_rig()
    rig.add(make_request(1, "abcdef", 9, beam=BeamParams(4, 4)))
    step(rig)
    rig.lose()
    assert [reason for _, reason in rig.attach(12).finished] == [FinishReason.CAPACITY]


@pytest.mark.parametrize("max_num_batched_tokens", [4, 64])
def test_prompt_tokens_are_reported_on_though_others_computed_them(max_num_batched_tokens: int) -> None:
    limits = SchedulerLimits(4, max_num_batched_tokens, 60, max_in_flight=2)
    rig = Rig(limits, num_blocks=60, block_size=4, vocab_size=VOCAB_SIZE)
    rig.attach()
    prompt = to_ids("abcdefghijklm")
    for request_id in (1, 2):
        params = SequenceParams(max_total_tokens=17, num_prompt_logprobs=3, num_logprobs=2)
        rig.add(Request(request_id, prompt, params))
    rig.run()
    assert rig.clients.num_prompt_logprobs == {1: 12, 2: 12}
    assert rig.coverage.num_logprobs == 8
    assert rig.scheduler.state.counters.num_prefix_hit_tokens == 0


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    """Four prompts of 18 tokens, 16 of them common: 18 + 3 x 2 tokens are computed, and it takes one plan more."""
    rig = build_rig()
    for request_id in range(4):
        rig.add(make_request(request_id, "abcdefghijklmnop" + "qrst"[request_id] * 2, 1))
    step(rig)
    step(rig)
    assert not rig.scheduler.num_unfinished_requests
    assert rig.scheduler.state.counters.num_prefix_hit_tokens == 3 * 16
