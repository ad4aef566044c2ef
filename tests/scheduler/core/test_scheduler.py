"""The scheduler's verbs, one by one: what each refuses, and what it leaves behind."""

from dataclasses import replace

import pytest

from scheduler.core import (
    BeamParams,
    BlockRun,
    BlockState,
    CapacityExceeded,
    FinishReason,
    InvariantViolation,
    Logprobs,
    QueueFull,
    Request,
    ResultMismatch,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepPlan,
    StepResult,
    block_map,
    kv_usage,
)
from scheduler.core.inspect.views import unfinished_sequences
from tests.support.core.letters import VOCAB_SIZE, make_request
from tests.support.core.rig import Rig
from tests.support.core.snapshot import take_snapshot

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)


def build_rig(limits: SchedulerLimits = LIMITS, *, num_usable_blocks: int = 20, block_size: int = 4) -> Rig:
    rig = Rig(limits, num_blocks=num_usable_blocks + 1, block_size=block_size, vocab_size=VOCAB_SIZE)
    rig.attach()
    return rig


# --- limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("max_num_seqs", 0), ("max_model_len", 0), ("max_in_flight", 0), ("max_waiting_requests", 0)]
)
def test_limits_are_positive(name: str, value: int) -> None:
    numbers = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1} | {name: value}
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(**numbers)


def test_a_budget_has_room_for_every_decode() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=3, max_model_len=10)


# --- add --------------------------------------------------------------------------------------------------------


def test_takes_what_fits_to_the_last_token() -> None:
    rig = build_rig(num_usable_blocks=3)
    assert rig.scheduler.max_tokens_per_sequence == 13, "the KV of the last token is never needed"
    rig.add(make_request(1, "abcdef", 7))
    with pytest.raises(CapacityExceeded, match="13"):
        rig.add(make_request(2, "abcdef", 8))
    rig.run()
    assert len(rig.clients.received[1, 0]) == 7


def test_refuses_what_can_never_fit() -> None:
    scheduler = build_rig().scheduler
    before = take_snapshot(scheduler)
    for request, problem in (
        (make_request(1, "a" * 20, 1), "can hold 20"),
        (make_request(2, "abc", 0), "no room for output"),
        (make_request(3, "abc", seeds=range(5)), "at most 4"),
    ):
        with pytest.raises(CapacityExceeded, match=problem):
            scheduler.add(request)
    assert take_snapshot(scheduler) == before


def test_the_queue_is_bounded_in_requests_and_in_prompt_tokens() -> None:
    limits = SchedulerLimits(4, 16, 20, max_waiting_requests=2, max_waiting_prompt_tokens=10)
    rig = build_rig(limits)
    rig.add(make_request(1, "abcdefgh"))
    with pytest.raises(QueueFull, match="8 prompt tokens"):
        rig.add(make_request(2, "abc"))
    rig.add(make_request(3, "ab"))
    with pytest.raises(QueueFull, match="2 requests"):
        rig.add(make_request(4, "a"))
    rig.schedule()
    rig.add(make_request(4, "a"))


def test_an_empty_queue_takes_any_request() -> None:
    rig = build_rig(SchedulerLimits(4, 16, 20, max_waiting_prompt_tokens=2))
    rig.add(make_request(1, "abcdef"))
    rig.run()


# --- ends -------------------------------------------------------------------------------------------------------


def test_an_unknown_or_ended_request_can_be_cancelled_and_stopped() -> None:
    rig = build_rig()
    rig.add(make_request(1))
    rig.run()
    before = take_snapshot(rig.scheduler)
    for request_id in (1, 99):
        rig.scheduler.cancel(request_id)
        assert rig.scheduler.stop(request_id, 0).finished == []
    assert take_snapshot(rig.scheduler) == before


def test_a_cancelled_request_is_gone_at_once_wherever_it_is() -> None:
    rig = build_rig(SchedulerLimits(1, 16, 20))
    rig.add(make_request(1))
    rig.add(make_request(2))
    rig.schedule()
    for request_id in (2, 1):
        rig.cancel(request_id)
        assert not rig.scheduler.has_request(request_id)
    assert rig.scheduler.state.cache.pool.num_free_blocks < 20, "a plan in flight still writes"
    rig.commit()
    rig.assert_idle()


def test_samples_end_one_by_one() -> None:
    rig = build_rig()
    rig.add(make_request(1, "abc", 9, seeds=range(3)))
    rig.schedule()
    rig.commit()
    rig.stop(1, 1)
    assert rig.clients.ended == {(1, 1): FinishReason.STOP}
    assert [sequence.index for sequence in unfinished_sequences(rig.scheduler.state)] == [0, 2]
    rig.run()


def test_every_end_has_its_reason() -> None:
    rig = build_rig()
    for request_id in (1, 2, 3):
        rig.add(make_request(request_id, deadline_s=5.0 if request_id == 3 else None))
    rig.schedule()
    rig.cancel(2)
    rig.expire(5.0)
    rig.run()
    assert rig.clients.ended == {
        (1, 0): FinishReason.LENGTH,
        (2, 0): FinishReason.CANCELLED,
        (3, 0): FinishReason.DEADLINE,
    }


# --- deadlines --------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_when_it_has_come_and_not_before() -> None:
    rig = build_rig(SchedulerLimits(1, 16, 20))
    rig.add(make_request(1, deadline_s=2.0))
    rig.add(make_request(2, deadline_s=1.0))
    rig.schedule()
    rig.expire(0.99)
    assert rig.clients.ended == {}
    rig.expire(1.0)
    assert rig.clients.ended == {(2, 0): FinishReason.DEADLINE}, "in the queue"
    rig.expire(3.0)
    assert rig.clients.ended[1, 0] is FinishReason.DEADLINE, "while it ran"


def test_knows_the_next_deadline_of_those_that_have_not_ended() -> None:
    rig = build_rig()
    assert rig.scheduler.state.deadlines.next_s is None
    for request_id, deadline_s in enumerate((7.0, 3.0, None, 5.0)):
        rig.add(make_request(request_id, deadline_s=deadline_s))
    assert rig.scheduler.state.deadlines.next_s == 3.0
    rig.cancel(1)
    assert rig.scheduler.state.deadlines.next_s == 5.0
    rig.run()
    assert rig.scheduler.state.deadlines.next_s is None


# --- executors --------------------------------------------------------------------------------------------------


def test_plans_nothing_without_an_executor() -> None:
    scheduler = Scheduler(LIMITS, num_blocks=9, block_size=4)
    scheduler.add(make_request(1))
    assert scheduler.schedule() is None
    assert scheduler.executor_lost().finished == [], "nobody was there to be lost"
    scheduler.executor_attached(1, 9)
    assert scheduler.schedule() is not None


def test_an_epoch_is_greater_than_the_last_and_begins_with_step_one() -> None:
    rig = build_rig()
    rig.add(make_request(1))
    rig.schedule()
    rig.lose()
    for epoch in (0, 1):
        with pytest.raises(ValueError, match="epoch"):
            rig.scheduler.executor_attached(epoch, 9)
    rig.attach()
    plan = rig.schedule()
    assert plan is not None
    assert (plan.epoch, plan.step_id) == (2, 1)


def test_one_executor_at_a_time() -> None:
    rig = build_rig()
    with pytest.raises(InvariantViolation, match="attached already"):
        rig.scheduler.executor_attached(2, 9)


def test_no_prefix_survives_its_executor() -> None:
    rig = build_rig()
    rig.add(make_request(1, "abcdefgh"))
    rig.run()
    rig.lose()
    rig.attach()
    rig.add(make_request(2, "abcdefgh"))
    rig.run()
    assert rig.clients.num_cached_tokens == {1: 0, 2: 0}


def test_who_was_preempted_has_been_in_the_queue_since_then() -> None:
    rig = build_rig(num_usable_blocks=4)
    for request_id in (1, 2):
        rig.add(make_request(request_id, "abcdefg"[request_id:], 9))
    rig.expire(10.0)
    while not rig.scheduler.state.counters.num_preemptions:
        assert rig.schedule() is not None
        rig.commit()
    assert [sequence.queued_s for sequence in rig.scheduler.state.waiting] == [10.0]


# --- results ----------------------------------------------------------------------------------------------------


def test_a_result_that_answers_no_plan_is_refused_and_changes_nothing() -> None:
    rig = build_rig()
    with pytest.raises(ResultMismatch, match="no plan is in flight"):
        rig.scheduler.commit(StepResult(1, 1, [0]))
    rig.add(make_request(1))
    rig.schedule()
    before = take_snapshot(rig.scheduler)
    for result in (
        StepResult(epoch=0, step_id=1, token_ids=[0]),
        StepResult(epoch=1, step_id=2, token_ids=[0]),
        StepResult(epoch=1, step_id=1, token_ids=[]),
        StepResult(epoch=1, step_id=1, token_ids=[0, 0]),
        StepResult(epoch=1, step_id=1, token_ids=[0], end_reasons=[]),
    ):
        with pytest.raises(ResultMismatch):
            rig.scheduler.commit(result)
    assert take_snapshot(rig.scheduler) == before
    rig.run()


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_result_with_a_token_beyond_the_vocabulary_is_refused_and_changes_nothing(token_id: int) -> None:
    """Wherever it stands: as an id it would be hashed, looked up and sent."""
    rig = build_rig()
    params = SequenceParams(max_total_tokens=8, num_logprobs=2, num_prompt_logprobs=2)
    rig.add(Request(1, (0, 1, 2, 3), params))
    rig.add(Request(2, (4, 5), SequenceParams(max_total_tokens=6), beam=BeamParams(2, 1)))
    rig.schedule()
    before, right = take_snapshot(rig.scheduler), rig.in_flight[0].result
    lies = [replace(right, token_ids=[token_id])]
    for part in ("logprobs", "prompt_logprobs", "candidates"):
        told: Logprobs = getattr(right, part)
        lies.append(replace(right, **{part: replace(told, token_ids=[*told.token_ids[:-1], token_id])}))
    for lie in lies:
        with pytest.raises(ResultMismatch, match=f" {token_id}"):
            rig.scheduler.commit(lie)
    assert take_snapshot(rig.scheduler) == before
    rig.run()


def test_a_request_starts_once_though_its_samples_are_preempted() -> None:
    """A recompute is not a start, and what it finds in the cache is not a hit."""
    limits = SchedulerLimits(4, 16, 20, max_in_flight=1, watermark_ratio=0)
    rig = build_rig(limits, num_usable_blocks=3, block_size=2)
    rig.add(make_request(1, "ab", 4, seeds=(0, 1)))
    rig.run()
    assert rig.scheduler.state.counters.num_preemptions > 0
    assert rig.clients.num_cached_tokens == {1: 0}
    assert rig.scheduler.state.counters.num_prefix_queried_tokens == 2


# --- plans ------------------------------------------------------------------------------------------------------


def test_an_unchanged_decode_batch_is_an_empty_plan() -> None:
    rig = build_rig(block_size=16)
    rig.add(make_request(1, "ab", 9))
    rig.add(make_request(2, "cde", 9))
    for _ in range(2):
        rig.schedule()
        rig.commit()
    assert rig.schedule() == StepPlan(epoch=1, step_id=3, num_sequences=2, num_tokens=2)


def test_the_watermark_keeps_blocks_for_those_who_run() -> None:
    limits = SchedulerLimits(4, 16, 20, watermark_ratio=0.2)
    rig = build_rig(limits, num_usable_blocks=4)
    rig.add(make_request(1, "abcdefgh", 1))
    rig.add(make_request(2, "ijklmnop", 1))
    rig.schedule()
    assert rig.scheduler.num_waiting == 1
    rig.run()


# --- views ------------------------------------------------------------------------------------------------------


def test_the_block_map_shows_who_holds_what() -> None:
    rig = build_rig(num_usable_blocks=5)
    rig.add(make_request(1, "abcdef", 1))
    rig.run()
    rig.add(make_request(2, "abcdxy", 6, seeds=range(2)))
    rig.schedule()
    picture = block_map(rig.scheduler)
    assert picture.blocks == [
        BlockRun(BlockState.FREE, 0, 0),  # the null block
        BlockRun(BlockState.ACTIVE, 2, 1),  # "abcd", found again
        BlockRun(BlockState.ACTIVE, 2, 0),  # "xy", shared by both samples
        BlockRun(BlockState.FREE, 0, 0, length=3),
    ]
    assert [(view.index, view.slot, view.block_table) for view in picture.sequences] == [(0, 0, (1, 2)), (1, 1, (1, 2))]
    assert (picture.block_size, picture.num_waiting, picture.step_id) == (4, 0, 2)


def test_usage_counts_a_shared_place_once() -> None:
    rig = build_rig(num_usable_blocks=5)
    assert kv_usage(rig.scheduler).waste_ratio == 0.0
    rig.add(make_request(1, "abcdef", 6, seeds=range(2)))
    rig.schedule()
    usage = kv_usage(rig.scheduler)
    assert (usage.num_active_blocks, usage.num_shared_blocks, usage.num_free_blocks) == (2, 2, 3)
    assert (usage.num_used_token_slots, usage.num_wasted_token_slots, usage.waste_ratio) == (6, 2, 0.25)
    rig.run()
    usage = kv_usage(rig.scheduler)
    assert usage.num_cached_blocks > 0
    assert usage.num_cached_blocks + usage.num_free_blocks == 5
