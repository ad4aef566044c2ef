"""Bounds how many lines of one kind a log gets, where clients decide how often the line is written."""

import logging
import time
from collections.abc import Callable


class RateLimit(logging.Filter):
    """Lets `per_second` records of each message through, and counts the others.

    The first record of a later second has the number of those that were left out, as the field `left_out`. Messages
    are the texts before their arguments are put in, so that there are as many as there are lines of code.
    """

    def __init__(self, per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._per_second = per_second
        self._clock = clock
        self._second: dict[object, int] = {}
        self._num_passed: dict[object, int] = {}
        self._num_left_out: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        message, second = record.msg, int(self._clock())
        if self._second.get(message) != second:
            self._second[message] = second
            self._num_passed[message] = 0
            if num_left_out := self._num_left_out.pop(message, 0):
                record.left_out = num_left_out
        self._num_passed[message] += 1
        if self._num_passed[message] <= self._per_second:
            return True
        self._num_left_out[message] = self._num_left_out.get(message, 0) + 1
        return False
