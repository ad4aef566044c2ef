"""The time after which a refused request should come again."""

import pytest

from scheduler.engine import dispatcher
from scheduler.engine.dispatcher import EventDispatcher, Sink


class Silent(Sink):
    """A sink that is told nothing here."""


def test_the_time_in_which_nothing_was_asked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a quiet night, the first refused clients of the morning were told to wait for 30 s."""
    now_s = 1000.0
    monkeypatch.setattr(dispatcher.time, "monotonic", lambda: now_s)
    events = EventDispatcher()

    def end_requests(number: int) -> None:
        nonlocal now_s
        for request_id in range(number):
            events.add(request_id, Silent())
        for request_id in range(number):
            now_s += 0.05
            assert events.forget(request_id)

    end_requests(100)
    before_s = events.retry_after_s
    assert before_s == 0.1
    now_s += 8 * 3600
    end_requests(2)
    assert events.retry_after_s == before_s
