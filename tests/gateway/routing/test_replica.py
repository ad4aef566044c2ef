"""The state of a replica counts every request once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_view import PrefixView
from gateway.routing.replica import ReplicaState
from gateway.routing.replicas import ASSUMED_PREFILL_S, Replicas
from tests.support.gateway.routed_fleet import replicas_of

LOAD = ReplicaLoad(num_running=2, num_waiting=1, queued_tokens=100, prefill_s_per_token=0.001, decode_step_s=0.01)


def state() -> ReplicaState:
    return ReplicaState("a", 1, PrefixView())


def test_a_choice_counts_at_once_and_then_as_a_part_of_the_report() -> None:
    known = state()
    known.report(LOAD, 0)
    assert (known.num_requests, known.backlog_s) == pytest.approx((3, 0.1 + 20 * 0.03))
    assert [known.count(50), known.count(7)] == [1, 2]
    assert (known.num_requests, known.backlog_s) == pytest.approx((5, 0.157 + 20 * 0.05))
    known.report(LOAD, 1)
    assert (known.num_requests, known.backlog_s) == pytest.approx((4, 0.107 + 20 * 0.04))
    known.report(LOAD, 2)
    assert (known.num_requests, known.backlog_s) == pytest.approx((3, 0.1 + 20 * 0.03))


def test_a_request_that_is_taken_back_counts_no_more() -> None:
    known = state()
    known.report(LOAD, 0)
    first, second = known.count(50), known.count(7)
    known.take_back(first)
    known.take_back(first)
    assert known.num_requests == 4
    known.report(LOAD, 2)
    known.take_back(second)  # the report contains it; the next one will not
    assert known.num_requests == 3


def test_a_prompt_leaves_the_queue_with_its_first_token() -> None:
    known = state()
    known.report(LOAD, 0)
    number = known.count(50)
    known.first_token(number)
    assert (known.num_requests, known.backlog_s) == pytest.approx((4, 0.1 + 20 * 0.04))


def test_the_number_of_a_request_before_a_reset_belongs_to_no_later_one() -> None:
    known = state()
    before = known.count(50)
    known.reset()
    after = known.count(7)
    known.take_back(before)
    known.first_token(before)
    assert (before, after, known.num_requests) == (1, 2, 1)
    known.report(LOAD, 1)  # the replica counts from 1 again
    assert known.num_requests == 3


def test_the_prompt_of_a_sent_request_counts_as_held_until_it_ends() -> None:
    known = state()
    known.view.apply(1, [1], [])
    first, second = known.count(9, [1, 2, 3]), known.count(9, [1, 2, 4])
    assert known.view.num_cached([1, 2, 3]) == 3
    known.take_back(first)
    assert [known.view.num_cached([1, 2, each]) for each in (3, 4)] == [2, 3]
    known.view.apply(2, [2], [])
    known.take_back(second)
    assert known.view.num_cached([1, 2, 4]) == 2
    known.view.apply(3, [], [2])
    assert known.view.num_cached([1, 2, 4]) == 1


@given(st.lists(st.sampled_from(["send", "report", "late report", "first token", "end"]), max_size=40))
def test_no_request_counts_twice(actions: list[str]) -> None:
    """A replica that reports what it has received; requests end in the order in which they were sent."""
    known, open_numbers, num_ended = state(), list[int](), 0
    reports: list[tuple[ReplicaLoad, int]] = [(ReplicaLoad(), 0)]
    num_sent = 0
    for action in actions:
        if action == "send":
            open_numbers.append(known.count(10))
            num_sent += 1
        elif action == "report":
            reports.append((ReplicaLoad(num_running=num_sent - num_ended), num_sent))
            known.report(*reports[-1])
            assert known.num_requests == len(open_numbers)
        elif action == "late report":
            known.report(*reports[-1])
            assert known.num_requests >= len(open_numbers)
        elif action == "first token" and open_numbers:
            known.first_token(open_numbers[0])
        elif action == "end" and open_numbers:
            known.take_back(open_numbers.pop(0))
            num_ended += 1
    known.report(ReplicaLoad(num_running=num_sent - num_ended), num_sent)
    assert known.num_requests == len(open_numbers)


def test_a_replica_that_has_not_measured_its_speed_counts_like_the_others() -> None:
    replicas = replicas_of("a", "b")
    for _ in range(100):
        replicas.report("a", LOAD, 0)
    replicas.report("b", ReplicaLoad(queued_tokens=100), 0)
    assert 0.09 < replicas["b"].backlog_s < 0.11
    fresh = Replicas()
    fresh.add("c")
    fresh.report("c", ReplicaLoad(queued_tokens=100), 0)
    assert fresh["c"].backlog_s == 100 * ASSUMED_PREFILL_S


def test_a_replica_that_is_not_ready_keeps_its_place_on_the_ring() -> None:
    replicas = replicas_of("a", "b", "c")
    key = next(key for i in range(100) if replicas.ring.home(key := str(i).encode(), replicas.ready()) == "b")
    replicas.set_ready("b", False)
    assert replicas.ring.home(key, replicas.ready()) in ("a", "c")
    replicas.set_ready("b", True)
    assert replicas.ring.home(key, replicas.ready()) == "b"


def test_a_replica_that_is_removed_leaves_nothing_and_its_number_is_used_again() -> None:
    replicas = replicas_of("a", "b")
    replicas["b"].view.apply(1, [1, 2], [])
    replicas["b"].count(5, [1, 2, 3])
    replicas.remove("b")
    assert (len(replicas), len(replicas.index), list(replicas.ready())) == (1, 0, ["a"])
    assert replicas.add("c").bit == 0b10
    assert replicas.ring.home(b"key", {"b"}) is None


def test_without_reports_own_requests_count_until_they_end() -> None:
    replica = state()
    numbers = [replica.count(10) for _ in range(3)]
    replica.report(ReplicaLoad(num_running=3), 3)
    assert replica.num_requests == 3
    replica.lose_reports()
    assert replica.num_requests == 3
    replica.take_back(numbers[0])
    assert replica.num_requests == 2
    replica.reset()
    replica.report(ReplicaLoad(num_running=2), 0)
    replica.take_back(numbers[1])
    assert replica.num_requests == 2, "the next report has one less"


def test_a_request_that_was_not_sent_leaves_no_gap_in_the_numbers() -> None:
    replica = state()
    for _ in range(5):
        replica.not_sent(replica.count(10))
    replica.count(10)
    replica.report(ReplicaLoad(num_running=1), 1)
    assert replica.num_requests == 1
