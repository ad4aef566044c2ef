"""Sequences for whose next token the executor does not wait: they lose nothing, and delay no other (I27)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core import BeamParams, FinishReason, QueueFull
from scheduler.core.fairness.fair_queue import MAX_SET_ASIDE
from scheduler.core.tenants.account import PROMPT_TOKEN_COST
from tests.support.core.letter_tokens import make_request
from tests.support.core.small_harness import build_harness


def test_the_pause_doubles_while_the_token_is_late_and_begins_anew_with_the_next() -> None:
    harness = build_harness(make_request(1, max_tokens=4))
    pauses_s = []
    for _ in range(9):
        harness.defer(1)
        assert harness.schedule() is not None
        assert harness.commit().finished == []
        assert harness.schedule() is None
        next_s = harness.scheduler.next_wake_s
        assert next_s is not None
        pauses_s.append(round(next_s - harness.now_s, 6))
        harness.expire(next_s)
    assert pauses_s == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64, 0.64]
    harness.schedule()
    assert len(harness.commit().token_ids) == 1
    harness.defer(1)
    harness.schedule()
    harness.commit()
    assert harness.schedule() is None
    assert harness.scheduler.next_wake_s == pytest.approx(harness.now_s + 0.01)
    harness.run()
    assert harness.scheduler.state.counters.num_deferrals == 10


def test_others_overtake_a_deferred_sequence_and_it_returns_to_its_place() -> None:
    harness = build_harness(make_request(1, max_tokens=4), max_num_seqs=1)
    harness.defer(1)
    harness.schedule()
    harness.commit()
    harness.add(make_request(2, "klm", max_tokens=2))
    harness.add(make_request(3, "xyz", max_tokens=2))
    harness.schedule()
    assert [s.request.request_id for s in harness.scheduler.state.batch.running] == [2]
    harness.expire(0.01)
    harness.commit()
    for _ in range(2):
        harness.schedule()
        harness.commit()
    assert [s.request.request_id for s in harness.scheduler.state.batch.running] == [1]
    harness.run()


def test_results_of_plans_in_flight_do_not_count() -> None:
    harness = build_harness(make_request(1, max_tokens=6), max_in_flight=3)
    harness.schedule()
    harness.defer(1)
    for _ in range(2):
        harness.schedule()
    assert len(harness.commit().token_ids) == 1
    harness.scheduler.state.cache.pool.free_blocks()
    for _ in range(2):
        assert harness.commit().token_ids == []
    harness.run()


@pytest.mark.parametrize("num_deferred", [1, 2, 3])
def test_samples_are_deferred_one_by_one(num_deferred: int) -> None:
    harness = build_harness(make_request(1, max_tokens=5, seeds=(1, 2, 3)))
    harness.defer(num_deferred)
    harness.schedule()
    assert len(harness.commit().token_ids) == 3 - num_deferred
    harness.run()
    assert harness.scheduler.state.counters.num_deferrals == num_deferred


def test_a_deferred_sequence_can_be_stopped_cancelled_expired_and_lose_its_executor() -> None:
    for end in ("stop", "cancel", "expire", "lose"):
        harness = build_harness(make_request(1, max_tokens=6, deadline_s=5.0), make_request(2, "klm", max_tokens=3))
        harness.schedule()
        harness.commit()
        harness.defer(1)
        harness.schedule()
        harness.commit()
        if end == "stop":
            assert [reason for _, reason in harness.stop(1, 0).finished] == [FinishReason.STOP]
        elif end == "cancel":
            harness.cancel(1)
        elif end == "expire":
            assert [reason for _, reason in harness.expire(6.0).finished] == [FinishReason.DEADLINE]
        else:
            harness.schedule()
            harness.lose()
        harness.run()


def test_a_request_whose_last_token_is_late_ends_by_its_length_later() -> None:
    harness = build_harness(make_request(1, max_tokens=1))
    harness.defer(1)
    harness.schedule()
    assert harness.commit().finished == []
    harness.run()
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH}


@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize("num_late", [1, 2])
def test_late_beams_stay_in_their_slots_and_others_are_not_computed_again(num_before: int, num_late: int) -> None:
    harness = build_harness(make_request(1, max_tokens=5, beam=BeamParams(2, 2)), block_size=2)
    for _ in range(num_before):
        harness.schedule()
        harness.commit()
    harness.defer(num_late)
    plan = harness.schedule()
    assert plan is not None
    num_late = min(num_late, plan.num_sequences)
    harness.defer(0)
    harness.commit()
    assert harness.schedule() is None
    assert harness.scheduler.next_wake_s == pytest.approx(harness.now_s + 0.01)
    harness.expire(harness.now_s + 0.01)
    plan = harness.schedule()
    assert plan is not None
    assert (plan.num_sequences, plan.num_tokens) == (num_late, num_late)
    assert plan.row_counts
    assert [plan.branches, plan.admissions, plan.table_updates, plan.block_copies] == [[]] * 4
    harness.commit()
    harness.run()
    assert harness.scheduler.state.counters.num_deferrals == num_late
    assert harness.scheduler.state.counters.num_preemptions == 0


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_a_block_whose_last_token_is_late_is_not_published_yet(num_before: int) -> None:
    harness = build_harness(make_request(1, "abcd", max_tokens=6, beam=BeamParams(2, 2)), block_size=2)
    for _ in range(num_before):
        harness.schedule()
        harness.commit()
    harness.defer(1)
    harness.schedule()
    harness.commit()
    state = harness.scheduler.state
    (late,) = [beam for group in state.batch.paused for beam in group.late]
    assert late.num_computed_tokens == late.num_planned_tokens - 1
    assert late.block_table[-1] not in state.cache.index
    harness.run()


def test_the_pause_of_beams_doubles_and_others_run_meanwhile() -> None:
    harness = build_harness(make_request(1, max_tokens=4, beam=BeamParams(2, 2)))
    harness.schedule()
    harness.commit()
    pauses_s = []
    for _ in range(3):
        harness.defer(2)
        harness.schedule()
        harness.commit()
        next_s = harness.scheduler.next_wake_s
        assert next_s is not None
        pauses_s.append(round(next_s - harness.now_s, 6))
        harness.expire(next_s)
    assert pauses_s == [0.01, 0.02, 0.04]
    harness.defer(2)
    harness.schedule()
    harness.commit()
    harness.add(make_request(2, "klm", max_tokens=2))
    for _ in range(2):
        assert harness.schedule() is not None
        assert len(harness.commit().token_ids) == 1
    harness.run()


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("end", ["cancel", "expire", "lose", "preempt"])
def test_a_group_with_late_beams_can_end(end: str, num_before: int) -> None:
    search = make_request(1, max_tokens=6, deadline_s=5.0, beam=BeamParams(2, 2))
    harness = build_harness(search, make_request(2, "klm", max_tokens=9))
    for _ in range(num_before):
        harness.schedule()
        harness.commit()
    harness.defer(1)
    harness.schedule()
    harness.commit()
    state = harness.scheduler.state
    harness.defer(0)
    if end == "cancel":
        harness.cancel(1)
    elif end == "expire":
        assert [reason for _, reason in harness.expire(6.0).finished] == [FinishReason.DEADLINE]
    elif end == "lose":
        harness.lose()
    else:
        group = state.requests[1].group
        assert group is not None
        state.preempt(group.leader)
        harness.check()
    assert not state.batch.paused
    harness.run()


def test_others_of_the_tenant_enter_beside_any_number_of_deferred_samples() -> None:
    samples = make_request(1, max_tokens=3, seeds=range(MAX_SET_ASIDE + 4))
    harness = build_harness(samples, max_num_seqs=32, max_num_batched_tokens=32)
    harness.defer(MAX_SET_ASIDE + 4)
    harness.schedule()
    harness.commit()
    assert harness.scheduler.num_waiting == 0
    harness.add(make_request(2, "klm", max_tokens=2))
    assert harness.schedule() is not None
    harness.run()


def test_deferred_sequences_count_for_the_bounds_of_the_queue() -> None:
    harness = build_harness(make_request(1, max_tokens=3, seeds=(1, 2)))
    harness.defer(2)
    harness.schedule()
    harness.commit()
    limits = replace(harness.scheduler.state.limits, max_waiting_requests=2)
    harness.scheduler.state.waiting._limits = limits
    with pytest.raises(QueueFull):
        harness.add(make_request(2, "klm"))
    harness.run()


@pytest.mark.parametrize("is_lost_first", [False, True])
def test_a_tenant_pays_for_what_its_deferred_sequences_compute_again(is_lost_first: bool) -> None:
    harness = build_harness(make_request(1, max_tokens=4), block_size=16)
    if is_lost_first:
        harness.schedule()
        harness.lose()
        harness.attach()
    harness.defer(1)
    harness.schedule()
    harness.commit()
    account = next(iter(harness.scheduler.state.accounts))
    cost = account.cost
    harness.schedule()
    harness.expire(1.0)
    harness.schedule()
    assert account.cost == cost + 3 * PROMPT_TOKEN_COST
    harness.run()


def test_what_is_recomputed_after_a_loss_is_not_charged_to_a_sequence_that_was_deferred_before() -> None:
    harness = build_harness(make_request(1, max_tokens=12))
    harness.defer(1)
    for _ in range(2):
        harness.schedule()
        harness.commit()
        harness.expire(harness.now_s + 1.0)
    account = next(iter(harness.scheduler.state.accounts))
    cost = account.cost
    harness.lose()
    harness.attach()
    harness.schedule()
    assert account.cost == cost
    harness.run()


def test_reports_on_a_prompt_are_not_computed_again() -> None:
    params = replace(make_request(1, "abcdefgh", max_tokens=3).params, num_prompt_logprobs=1)
    harness = build_harness(replace(make_request(1, "abcdefgh", max_tokens=3), params=params), block_size=4)
    harness.defer(1)
    harness.schedule()
    assert len(harness.commit().prompt_logprobs) == 1
    harness.run()
    assert harness.scheduler.state.counters.num_prefilled_tokens == 8 + 4, "one block is found again"
