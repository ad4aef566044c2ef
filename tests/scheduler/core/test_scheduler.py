"""The methods of the scheduler, one by one: their effects, and the calls that they refuse."""

import gc
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
from scheduler.core.sequence import Sequence
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request
from tests.support.core.snapshot import take_snapshot

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)


def build_harness(limits: SchedulerLimits = LIMITS, *, num_usable_blocks: int = 20, block_size: int = 4) -> Harness:
    harness = Harness(limits, num_blocks=num_usable_blocks + 1, block_size=block_size, vocab_size=VOCAB_SIZE)
    harness.attach()
    return harness


def test_finished_sequences_are_freed_without_a_collection_of_garbage() -> None:
    """A full collection visits everything that waits, and stops the event loop meanwhile."""
    harness = build_harness()
    gc.collect()
    gc.disable()
    of_other_tests = {id(each) for each in gc.get_objects() if type(each) is Sequence}
    try:
        harness.add(make_request(1, prompt="abcdef", max_tokens=3))
        harness.add(make_request(2, prompt="bcd", max_tokens=2, seeds=(0, 1)))
        harness.add(make_request(3, prompt="cde", max_tokens=3, beam=BeamParams(width=2, num_returned=2)))
        harness.run()
        left = [each for each in gc.get_objects() if type(each) is Sequence]
        assert {id(each) for each in left} <= of_other_tests
    finally:
        gc.enable()


# --- limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("max_num_seqs", 0), ("max_model_len", 0), ("max_in_flight", 0), ("max_waiting_requests", 0)]
)
def test_limits_are_positive(name: str, value: int) -> None:
    numbers = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1} | {name: value}
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(**numbers)


def test_a_budget_below_one_token_per_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=3, max_model_len=10)


# --- add --------------------------------------------------------------------------------------------------------


def test_accepts_a_request_that_fits_to_the_last_token() -> None:
    harness = build_harness(num_usable_blocks=3)
    assert harness.scheduler.max_tokens_per_sequence == 13, "the KV of the last token is never needed"
    harness.add(make_request(1, "abcdef", 7))
    with pytest.raises(CapacityExceeded, match="13"):
        harness.add(make_request(2, "abcdef", 8))
    harness.run()
    assert len(harness.clients.received[1, 0]) == 7


def test_refuses_requests_that_can_never_fit() -> None:
    scheduler = build_harness().scheduler
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
    harness = build_harness(limits)
    harness.add(make_request(1, "abcdefgh"))
    with pytest.raises(QueueFull, match="8 prompt tokens"):
        harness.add(make_request(2, "abc"))
    harness.add(make_request(3, "ab"))
    with pytest.raises(QueueFull, match="2 requests"):
        harness.add(make_request(4, "a"))
    harness.schedule()
    harness.add(make_request(4, "a"))


def test_an_empty_queue_takes_any_request() -> None:
    harness = build_harness(SchedulerLimits(4, 16, 20, max_waiting_prompt_tokens=2))
    harness.add(make_request(1, "abcdef"))
    harness.run()


# --- ends -------------------------------------------------------------------------------------------------------


def test_an_unknown_or_ended_request_can_be_cancelled_and_stopped() -> None:
    harness = build_harness()
    harness.add(make_request(1))
    harness.run()
    before = take_snapshot(harness.scheduler)
    for request_id in (1, 99):
        harness.scheduler.cancel(request_id)
        assert harness.scheduler.stop(request_id, 0).finished == []
    assert take_snapshot(harness.scheduler) == before


def test_a_cancelled_request_is_gone_at_once_waiting_or_running() -> None:
    harness = build_harness(SchedulerLimits(1, 16, 20))
    harness.add(make_request(1))
    harness.add(make_request(2))
    harness.schedule()
    for request_id in (2, 1):
        harness.cancel(request_id)
        assert not harness.scheduler.has_request(request_id)
    assert harness.scheduler.state.cache.pool.num_free_blocks < 20, "a plan in flight still writes"
    harness.commit()
    harness.assert_idle()


def test_samples_end_one_by_one() -> None:
    harness = build_harness()
    harness.add(make_request(1, "abc", 9, seeds=range(3)))
    harness.schedule()
    harness.commit()
    harness.stop(1, 1)
    assert harness.clients.ended == {(1, 1): FinishReason.STOP}
    assert [sequence.index for sequence in unfinished_sequences(harness.scheduler.state)] == [0, 2]
    harness.run()


def test_every_end_has_a_reason() -> None:
    harness = build_harness()
    for request_id in (1, 2, 3):
        harness.add(make_request(request_id, deadline_s=5.0 if request_id == 3 else None))
    harness.schedule()
    harness.cancel(2)
    harness.expire(5.0)
    harness.run()
    assert harness.clients.ended == {
        (1, 0): FinishReason.LENGTH,
        (2, 0): FinishReason.CANCELLED,
        (3, 0): FinishReason.DEADLINE,
    }


# --- deadlines --------------------------------------------------------------------------------------------------


def test_a_request_ends_at_its_deadline_and_not_before() -> None:
    harness = build_harness(SchedulerLimits(1, 16, 20))
    harness.add(make_request(1, deadline_s=2.0))
    harness.add(make_request(2, deadline_s=1.0))
    harness.schedule()
    harness.expire(0.99)
    assert harness.clients.ended == {}
    harness.expire(1.0)
    assert harness.clients.ended == {(2, 0): FinishReason.DEADLINE}, "in the queue"
    harness.expire(3.0)
    assert harness.clients.ended[1, 0] is FinishReason.DEADLINE, "while it ran"


def test_the_next_deadline_is_that_of_an_unfinished_request() -> None:
    harness = build_harness()
    assert harness.scheduler.state.deadlines.next_s is None
    for request_id, deadline_s in enumerate((7.0, 3.0, None, 5.0)):
        harness.add(make_request(request_id, deadline_s=deadline_s))
    assert harness.scheduler.state.deadlines.next_s == 3.0
    harness.cancel(1)
    assert harness.scheduler.state.deadlines.next_s == 5.0
    harness.run()
    assert harness.scheduler.state.deadlines.next_s is None


# --- executors --------------------------------------------------------------------------------------------------


def test_plans_nothing_without_an_executor() -> None:
    scheduler = Scheduler(LIMITS, num_blocks=9, block_size=4)
    scheduler.add(make_request(1))
    assert scheduler.schedule() is None
    assert scheduler.executor_lost().finished == [], "no executor was attached"
    scheduler.executor_attached(1, 9)
    assert scheduler.schedule() is not None


def test_epochs_increase_and_each_begins_with_step_one() -> None:
    harness = build_harness()
    harness.add(make_request(1))
    harness.schedule()
    harness.lose()
    for epoch in (0, 1):
        with pytest.raises(ValueError, match="epoch"):
            harness.scheduler.executor_attached(epoch, 9)
    harness.attach()
    plan = harness.schedule()
    assert plan is not None
    assert (plan.epoch, plan.step_id) == (2, 1)


def test_one_executor_at_a_time() -> None:
    harness = build_harness()
    with pytest.raises(InvariantViolation, match="attached already"):
        harness.scheduler.executor_attached(2, 9)


def test_cached_prefixes_are_dropped_with_their_executor() -> None:
    harness = build_harness()
    harness.add(make_request(1, "abcdefgh"))
    harness.run()
    harness.lose()
    harness.attach()
    harness.add(make_request(2, "abcdefgh"))
    harness.run()
    assert harness.clients.num_cached_tokens == {1: 0, 2: 0}


def test_the_queue_time_of_a_preempted_sequence_starts_at_its_preemption() -> None:
    harness = build_harness(num_usable_blocks=4)
    for request_id in (1, 2):
        harness.add(make_request(request_id, "abcdefg"[request_id:], 9))
    harness.expire(10.0)
    while not harness.scheduler.state.counters.num_preemptions:
        assert harness.schedule() is not None
        harness.commit()
    assert [sequence.queued_s for sequence in harness.scheduler.state.waiting] == [10.0]


# --- results ----------------------------------------------------------------------------------------------------


def test_a_result_that_answers_no_plan_is_refused_and_changes_nothing() -> None:
    harness = build_harness()
    with pytest.raises(ResultMismatch, match="no plan is in flight"):
        harness.scheduler.commit(StepResult(1, 1, [0]))
    harness.add(make_request(1))
    harness.schedule()
    before = take_snapshot(harness.scheduler)
    for result in (
        StepResult(epoch=0, step_id=1, token_ids=[0]),
        StepResult(epoch=1, step_id=2, token_ids=[0]),
        StepResult(epoch=1, step_id=1, token_ids=[]),
        StepResult(epoch=1, step_id=1, token_ids=[0, 0]),
        StepResult(epoch=1, step_id=1, token_ids=[0], end_reasons=[]),
    ):
        with pytest.raises(ResultMismatch):
            harness.scheduler.commit(result)
    assert take_snapshot(harness.scheduler) == before
    harness.run()


@pytest.mark.parametrize("asked", ["nothing", "candidates", "logprobs", "prompt_logprobs"])
def test_a_result_reports_what_its_step_asked_for_and_nothing_else(asked: str) -> None:
    harness = build_harness()
    widths = {"num_" + asked: 2} if asked.endswith("logprobs") else {}
    beam = BeamParams(2, 1) if asked == "candidates" else None
    harness.add(Request(1, (0, 1, 2, 3), SequenceParams(max_total_tokens=8, **widths), beam=beam))
    harness.schedule()
    before, right = take_snapshot(harness.scheduler), harness.in_flight[0].result
    one = Logprobs([0], [0.0], [0])
    for part in ("candidates", "logprobs", "prompt_logprobs"):
        assert (getattr(right, part) is not None) == (part == asked)
        wrong = None if part == asked else one
        with pytest.raises(ResultMismatch, match=f" {part} to report"):
            harness.scheduler.commit(replace(right, **{part: wrong}))
    assert take_snapshot(harness.scheduler) == before
    harness.run()


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_result_with_a_token_beyond_the_vocabulary_is_refused_and_changes_nothing(token_id: int) -> None:
    """Refused in every field: such an id would be hashed, looked up and sent."""
    harness = build_harness()
    params = SequenceParams(max_total_tokens=8, num_logprobs=2, num_prompt_logprobs=2)
    harness.add(Request(1, (0, 1, 2, 3), params))
    harness.add(Request(2, (4, 5), SequenceParams(max_total_tokens=6), beam=BeamParams(2, 1)))
    harness.schedule()
    before, right = take_snapshot(harness.scheduler), harness.in_flight[0].result
    wrong_results = [replace(right, token_ids=[token_id])]
    for part in ("logprobs", "prompt_logprobs", "candidates"):
        reported: Logprobs = getattr(right, part)
        wrong_results.append(
            replace(right, **{part: replace(reported, token_ids=[*reported.token_ids[:-1], token_id])})
        )
    for wrong in wrong_results:
        with pytest.raises(ResultMismatch, match=f" {token_id}"):
            harness.scheduler.commit(wrong)
    assert take_snapshot(harness.scheduler) == before
    harness.run()


def test_a_request_starts_once_even_if_its_samples_are_preempted() -> None:
    """A recompute is not a start, and blocks that it finds in the cache are not hits."""
    limits = SchedulerLimits(4, 16, 20, max_in_flight=1, watermark_ratio=0)
    harness = build_harness(limits, num_usable_blocks=3, block_size=2)
    harness.add(make_request(1, "ab", 4, seeds=(0, 1)))
    harness.run()
    assert harness.scheduler.state.counters.num_preemptions > 0
    assert harness.clients.num_cached_tokens == {1: 0}
    assert harness.scheduler.state.counters.num_prefix_queried_tokens == 2


# --- plans ------------------------------------------------------------------------------------------------------


def test_an_unchanged_decode_batch_is_an_empty_plan() -> None:
    harness = build_harness(block_size=16)
    harness.add(make_request(1, "ab", 9))
    harness.add(make_request(2, "cde", 9))
    for _ in range(2):
        harness.schedule()
        harness.commit()
    assert harness.schedule() == StepPlan(epoch=1, step_id=3, num_sequences=2, num_tokens=2)


def test_the_watermark_keeps_blocks_for_running_sequences() -> None:
    limits = SchedulerLimits(4, 16, 20, watermark_ratio=0.2)
    harness = build_harness(limits, num_usable_blocks=4)
    harness.add(make_request(1, "abcdefgh", 1))
    harness.add(make_request(2, "ijklmnop", 1))
    harness.schedule()
    assert harness.scheduler.num_waiting == 1
    harness.run()


# --- views ------------------------------------------------------------------------------------------------------


def test_the_block_map_shows_which_sequence_holds_which_block() -> None:
    harness = build_harness(num_usable_blocks=5)
    harness.add(make_request(1, "abcdef", 1))
    harness.run()
    harness.add(make_request(2, "abcdxy", 6, seeds=range(2)))
    harness.schedule()
    picture = block_map(harness.scheduler)
    assert picture.blocks == [
        BlockRun(BlockState.FREE, 0, 0),  # the null block
        BlockRun(BlockState.ACTIVE, 2, 1),  # "abcd", found again
        BlockRun(BlockState.ACTIVE, 2, 0),  # "xy", shared by both samples
        BlockRun(BlockState.FREE, 0, 0, length=3),
    ]
    assert [(view.index, view.slot, view.block_table) for view in picture.sequences] == [(0, 0, (1, 2)), (1, 1, (1, 2))]
    assert (picture.block_size, picture.num_waiting, picture.step_id) == (4, 0, 2)


def test_usage_counts_a_shared_token_slot_once() -> None:
    harness = build_harness(num_usable_blocks=5)
    assert kv_usage(harness.scheduler).waste_ratio == 0.0
    harness.add(make_request(1, "abcdef", 6, seeds=range(2)))
    harness.schedule()
    usage = kv_usage(harness.scheduler)
    assert (usage.num_active_blocks, usage.num_shared_blocks, usage.num_free_blocks) == (2, 2, 3)
    assert (usage.num_used_token_slots, usage.num_wasted_token_slots, usage.waste_ratio) == (6, 2, 0.25)
    harness.run()
    usage = kv_usage(harness.scheduler)
    assert usage.num_cached_blocks > 0
    assert usage.num_cached_blocks + usage.num_free_blocks == 5
