"""The records of requests, also of one that goes on at another server."""

from types import SimpleNamespace
from typing import Any

from planning.records import OpenRequest, Requests
from planning.workload import Job
from scheduler.core import Events, FinishReason


def sequence(num_given: int, num_tokens: int, **values: Any) -> Any:
    """Returns what the records read of a sequence: `num_given` tokens came with the request."""
    return SimpleNamespace(
        request=SimpleNamespace(request_id=7),
        token_ids=[1] * num_tokens,
        num_tokens=num_tokens,
        num_given_tokens=num_given,
        **values,
    )


def committed(
    requests: Requests, open_requests: dict[int, OpenRequest], now_s: float, events: Events
) -> tuple[Any, Any]:
    return requests.committed(open_requests, now_s, now_s - 1, events, has_first_tokens=True)


def test_a_request_that_goes_on_at_another_server_has_the_times_of_the_first_and_the_preemptions_of_both() -> None:
    requests, entry = Requests(), OpenRequest(Job(5.0, 0, 10, 4), num_preemptions=2)
    open_requests = {7: entry}
    first = sequence(10, 11, num_cached_tokens=8)
    assert committed(requests, open_requests, 7.0, Events(started=[first], sequences=[first])) == ([entry], [])
    second = sequence(11, 12, num_cached_tokens=0)
    assert committed(requests, open_requests, 9.0, Events(started=[second], sequences=[second])) == ([entry], [])
    last = sequence(11, 14, num_preemptions=1)
    events = Events(sequences=[last], finished=[(last, FinishReason.LENGTH)])
    assert committed(requests, open_requests, 12.0, events) == ([], [entry])
    assert open_requests == {}
    assert (requests.arrival_s[0], requests.planned_s[0], requests.first_token_s[0], requests.end_s[0]) == (5, 6, 7, 12)
    assert (requests.num_cached_tokens[0], requests.num_preemptions[0], requests.num_output_tokens[0]) == (8, 3, 4)


def test_a_request_that_ends_before_it_is_planned_has_the_time_of_its_end() -> None:
    requests, open_requests = Requests(), {7: OpenRequest(Job(5.0, 0, 10, 4))}
    ended = sequence(10, 10, num_preemptions=0)
    committed(requests, open_requests, 8.0, Events(finished=[(ended, FinishReason.DEADLINE)]))
    assert (requests.planned_s[0], requests.first_token_s[0], requests.num_output_tokens[0]) == (8, 8, 0)
