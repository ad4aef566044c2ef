"""Deadlines: each is taken once and in order, and those of ended requests are removed."""

from random import Random

from scheduler.core import Request, SequenceParams
from scheduler.core.timing.deadlines import SPARE_ENTRIES, Deadlines


def request(request_id: int, deadline_s: float | None) -> Request:
    return Request(request_id, (1,), SequenceParams(max_total_tokens=2), deadline_s=deadline_s)


def test_entries_of_ended_requests_are_bounded() -> None:
    """Adds timeouts of a day, with no more than 100 requests at once."""
    unfinished: set[int] = set()
    deadlines = Deadlines(unfinished)
    for request_id in range(10_000):
        unfinished.add(request_id)
        deadlines.add(request(request_id, 86_400.0 + request_id))
        unfinished.discard(request_id - 100)
        assert len(deadlines) <= 2 * 101 + SPARE_ENTRIES + 1
    assert deadlines.next_s == 86_400.0 + 9_900


def test_every_deadline_is_taken_once_and_in_order() -> None:
    random = Random(0)
    due = {request_id: random.uniform(0, 100) for request_id in range(5 * SPARE_ENTRIES)}
    unfinished: set[int] = set()
    deadlines = Deadlines(unfinished)
    for request_id, deadline_s in due.items():
        unfinished.add(request_id)
        deadlines.add(request(request_id, deadline_s))
        if request_id % 5:
            unfinished.discard(request_id)
    taken = []
    for request_id in deadlines.take_due(50.0):
        unfinished.discard(request_id)
        taken.append(request_id)
    kept = sorted(range(0, 5 * SPARE_ENTRIES, 5), key=due.__getitem__)
    assert taken == [request_id for request_id in kept if due[request_id] <= 50.0]
    assert deadlines.next_s == min(due[request_id] for request_id in kept if due[request_id] > 50.0)


def test_without_a_deadline_there_is_no_entry() -> None:
    deadlines = Deadlines({1})
    deadlines.add(request(1, None))
    assert (len(deadlines), deadlines.next_s) == (0, None)
