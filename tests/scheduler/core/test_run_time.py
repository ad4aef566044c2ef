"""Waiting requests that start too late for their deadline end before any step is spent on them."""

from dataclasses import replace
from random import Random

import pytest

from scheduler.core import BeamParams, FinishReason, RunTime, SchedulerLimits
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import make_request

RUN_TIME = RunTime(token_s=1.0, num_output_tokens=10.0)


def one_slot(run_time: RunTime = RUN_TIME) -> Harness:
    """Returns a harness in which request 1 runs without a deadline, and the next one waits."""
    harness = Harness(SchedulerLimits(1, 16, 40), num_blocks=40, block_size=4)
    harness.attach()
    harness.scheduler.set_run_time(run_time)
    harness.add(make_request(1, max_tokens=12))
    harness.schedule()
    return harness


def run_until(harness: Harness, now_s: float) -> None:
    """Lets request 1 end, and the clock advance to `now_s`; then all that waits may start."""
    harness.cancel(1)
    while harness.in_flight:
        harness.commit()
    harness.expire(now_s)
    while harness.scheduler.num_unfinished_requests:
        harness.schedule()
        if harness.in_flight:
            harness.commit()
        harness.expire(now_s)


@pytest.mark.parametrize(("now_s", "reason"), [(14.0, FinishReason.LENGTH), (14.1, FinishReason.TOO_LATE)])
def test_a_request_starts_as_long_as_it_can_end_in_time(now_s: float, reason: FinishReason) -> None:
    harness = one_slot()
    harness.add(make_request(2, max_tokens=6, deadline_s=20.0))
    run_until(harness, now_s)
    assert harness.clients.ended[2, 0] is reason
    assert harness.clients.received[2, 0] == [] or reason is FinishReason.LENGTH


def test_an_output_is_expected_to_have_the_average_length() -> None:
    harness = one_slot()
    harness.add(make_request(2, max_tokens=20, deadline_s=20.0))
    harness.add(make_request(3, max_tokens=20, deadline_s=19.0))
    run_until(harness, 10.0)
    assert (harness.clients.ended[2, 0], harness.clients.ended[3, 0]) == (FinishReason.LENGTH, FinishReason.TOO_LATE)


def test_a_request_that_never_had_the_time_is_served_until_its_deadline() -> None:
    harness = one_slot()
    harness.add(make_request(2, max_tokens=20, deadline_s=5.0))
    run_until(harness, 4.0)
    assert harness.clients.ended[2, 0] is FinishReason.LENGTH


def test_without_a_pace_or_a_deadline_no_request_is_too_late() -> None:
    for run_time, deadline_s in ((RunTime(), 20.0), (RUN_TIME, None)):
        harness = one_slot(run_time)
        harness.add(make_request(2, max_tokens=6, deadline_s=deadline_s))
        run_until(harness, 19.9)
        assert harness.clients.ended[2, 0] is FinishReason.LENGTH


def test_a_request_with_output_continues_after_a_preemption() -> None:
    harness = one_slot()
    harness.cancel(1)
    harness.add(make_request(2, max_tokens=6, deadline_s=20.0))
    while not harness.clients.received[2, 0]:
        harness.schedule()
        harness.commit()
    harness.lose()
    harness.attach()
    run_until(harness, 19.0)
    assert harness.clients.ended[2, 0] is FinishReason.LENGTH


@pytest.mark.parametrize("beam", [None, BeamParams(1, 1)])
def test_a_stream_that_is_resumed_without_output_is_not_too_late(beam: BeamParams | None) -> None:
    """A search begins again with its prompt."""
    harness = one_slot()
    harness.add(replace(make_request(2, max_tokens=6, beam=beam, deadline_s=20.0), is_resumed=True))
    run_until(harness, 19.0)
    assert harness.clients.ended[2, 0] is FinishReason.LENGTH


def test_the_next_in_line_starts_in_the_same_plan() -> None:
    harness = one_slot()
    harness.add(make_request(2, max_tokens=6, deadline_s=16.0))
    harness.add(make_request(3, max_tokens=6, deadline_s=16.5))
    harness.add(make_request(4, max_tokens=6, deadline_s=30.0))
    harness.cancel(1)
    while harness.in_flight:
        harness.commit()
    harness.expire(11.0)
    harness.schedule()
    assert [sequence.request.request_id for sequence in harness.scheduler.state.batch.running] == [4]
    assert harness.scheduler.next_wake_s == 11.0, "the clients have to be told"
    assert {sequence.request.request_id for sequence, _ in harness.expire(11.0).finished} == {2, 3}
    assert harness.scheduler.next_wake_s != 11.0


def test_samples_and_beams_end_as_a_whole() -> None:
    harness = Harness(SchedulerLimits(3, 16, 40), num_blocks=40, block_size=4)
    harness.attach()
    harness.scheduler.set_run_time(RUN_TIME)
    harness.add(make_request(1, max_tokens=12, seeds=(1, 2, 3)))
    harness.schedule()
    harness.add(make_request(2, max_tokens=6, seeds=(1, 2, 3), deadline_s=20.0))
    harness.add(make_request(3, max_tokens=6, beam=BeamParams(3, 2), deadline_s=20.0))
    run_until(harness, 15.0)
    assert {key[0] for key, reason in harness.clients.ended.items() if reason is FinishReason.TOO_LATE} == {2, 3}
    assert not harness.scheduler.num_unfinished_requests


def test_a_request_is_not_too_late_while_one_of_its_samples_runs() -> None:
    """After a loss both samples wait. The second one is too late in the plan that has the row of the first."""
    harness = Harness(SchedulerLimits(8, 64, 64), num_blocks=100, block_size=4)
    harness.attach()
    harness.add(make_request(1, "abcdefghi", max_tokens=20, seeds=(1, 2), deadline_s=10.0))
    harness.schedule()
    harness.lose()
    harness.attach()
    harness.scheduler.set_run_time(RunTime(0.5, 10.0))
    harness.expire(4.9)
    harness.schedule()
    assert [sequence.index for sequence in harness.scheduler.state.waiting] == [1]
    harness.expire(5.1)
    while harness.scheduler.num_unfinished_requests:
        harness.schedule()
        harness.commit()
    assert {harness.clients.ended[1, index] for index in (0, 1)} == {FinishReason.LENGTH}


def test_no_step_is_spent_on_requests_that_start_too_late() -> None:
    random = Random(0)
    harness = one_slot(RunTime(0.1, 4.0))
    for request_id in range(2, 80):
        harness.add(make_request(request_id, max_tokens=4, deadline_s=random.uniform(1.0, 12.0)))
    now_s = 0.0
    while harness.scheduler.num_unfinished_requests:
        harness.schedule()
        now_s += 0.1
        if harness.in_flight:
            harness.commit()
        harness.expire(now_s)
    reasons = list(harness.clients.ended.values())
    assert reasons.count(FinishReason.TOO_LATE) >= 3
    assert reasons.count(FinishReason.LENGTH) >= 20
    for key, reason in harness.clients.ended.items():
        assert reason is FinishReason.LENGTH or not harness.clients.received[key], f"{key} was cut off"
