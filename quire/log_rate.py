"""Bounds how many lines of one kind a log gets, where clients decide how often the line is written."""

import logging
import time
from collections.abc import Callable


class RateLimit(logging.Filter):
    """Lets `per_second` records of one message through, and counts the others. Other messages pass.

    The first record of a later second has the number of those that were left out, as the field `left_out`.

    message      the text before its arguments are put in
    on_left_out  called for each record that is left out
    """

    def __init__(
        self,
        message: str,
        per_second: int,
        clock: Callable[[], float] = time.monotonic,
        on_left_out: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._message = message
        self._per_second = per_second
        self._clock = clock
        self._on_left_out = on_left_out
        self._second = -1
        self._num_passed = 0
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != self._message:
            return True
        if (second := int(self._clock())) != self._second:
            self._second, self._num_passed = second, 0
            if self._num_left_out:
                record.left_out, self._num_left_out = self._num_left_out, 0
        self._num_passed += 1
        if self._num_passed <= self._per_second:
            return True
        self._num_left_out += 1
        self._on_left_out()
        return False
