"""The waiting queue follows the order of the policy, whatever the order of arrival."""

import pytest

from scheduler.core import FCFS, PRIORITY, Policy, Request, Sequence, SequenceParams
from scheduler.core.waiting_queue import WaitingQueue


def sequence(arrival: int, priority: int = 0, index: int = 0, num_prompt_tokens: int = 1) -> Sequence:
    params = SequenceParams(max_total_tokens=100)
    request = Request(arrival, [0] * num_prompt_tokens, params, seeds=(0,) * (index + 1), priority=priority)
    return Sequence(request, index=index, arrival=arrival)


def queue_of(policy: Policy, *sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for member in sequences:
        queue.add(member)
    return queue


def drain(queue: WaitingQueue) -> list[Sequence]:
    order = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        order.append(first)
    return order


def test_an_empty_queue_has_no_first() -> None:
    queue = WaitingQueue(FCFS)
    assert queue.first() is None
    assert len(queue) == queue.num_prompt_tokens == 0


def test_fcfs_orders_by_arrival_whatever_the_priority() -> None:
    first, second, third = sequence(1, priority=9), sequence(2, priority=5), sequence(3, priority=0)
    assert drain(queue_of(FCFS, second, third, first)) == [first, second, third]


def test_priority_comes_before_arrival() -> None:
    late_urgent, early_usual, late_usual = sequence(3, priority=-1), sequence(1), sequence(2)
    assert drain(queue_of(PRIORITY, early_usual, late_usual, late_urgent)) == [late_urgent, early_usual, late_usual]


@pytest.mark.parametrize("policy", [FCFS, PRIORITY])
def test_a_returning_sequence_gets_its_old_place(policy: Policy) -> None:
    first, second, third = sequence(1), sequence(2), sequence(3)
    queue = queue_of(policy, first, second, third)
    queue.remove(first)
    queue.add(first)
    assert list(queue) == [first, second, third]


def test_samples_of_a_request_wait_in_order_of_their_index() -> None:
    samples = [sequence(1, index=index) for index in range(3)]
    assert drain(queue_of(FCFS, samples[2], samples[0], samples[1], sequence(2)))[:3] == samples


def test_removes_from_the_middle() -> None:
    first, second, third = sequence(1), sequence(2), sequence(3)
    queue = queue_of(FCFS, first, second, third)
    queue.remove(second)
    assert list(queue) == [first, third]


def test_removing_a_sequence_that_does_not_wait_raises() -> None:
    queue = queue_of(FCFS, sequence(1))
    with pytest.raises(LookupError):
        queue.remove(sequence(2))
    with pytest.raises(LookupError):
        queue.remove(sequence(1))  # another sequence with the same key
    assert len(queue) == 1


def test_counts_the_prompt_tokens_that_wait() -> None:
    short, long = sequence(1, num_prompt_tokens=3), sequence(2, num_prompt_tokens=40)
    queue = queue_of(FCFS, short, long)
    assert queue.num_prompt_tokens == 43
    long.token_ids.append(7)  # generated tokens are not prompt tokens
    queue.remove(long)
    assert queue.num_prompt_tokens == 3
