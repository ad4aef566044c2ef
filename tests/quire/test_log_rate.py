"""Lines that clients cause are bounded, and none is left out silently."""

import io
import json
import logging

import pytest

from quire import logs
from quire.log_rate import RateLimit


class Clock:
    now_s = 10.25

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def left_out() -> list[float]:
    """The times of the records that were left out."""
    return []


@pytest.fixture
def log(clock: Clock, left_out: list[float]) -> logging.Logger:
    log = logging.Logger("limited")
    log.addFilter(RateLimit("refused %d", 3, clock, lambda: left_out.append(clock())))
    return log


@pytest.fixture
def records(log: logging.Logger) -> list[logging.LogRecord]:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    log.addHandler(Keep())
    return records


def test_records_of_one_message_are_bounded_by_the_second(
    log: logging.Logger, records: list[logging.LogRecord], clock: Clock, left_out: list[float]
) -> None:
    for number in range(1000):
        log.info("refused %d", number)
    assert (len(records), len(left_out)) == (3, 997)
    clock.now_s += 1
    log.info("refused %d", 1000)
    log.info("refused %d", 1001)
    assert [getattr(record, "left_out", None) for record in records] == [None] * 3 + [997, None]


def test_other_messages_pass(log: logging.Logger, records: list[logging.LogRecord]) -> None:
    for number in range(10):
        log.info("refused %d", number)
        log.info("ended %d", number)
    assert [record.msg for record in records] == ["refused %d", "ended %d"] * 3 + ["ended %d"] * 7


def test_the_number_is_in_the_line(log: logging.Logger, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    logs.configure("scheduler", "info", "json", stream)
    log.addHandler(root.handlers[0])
    for number in range(5):
        log.info("refused %d", number)
    clock.now_s += 1
    log.info("refused %d", 5)
    root.handlers[0].flush()
    root.handlers[0].close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 4
    assert lines[-1]["left_out"] == 2
