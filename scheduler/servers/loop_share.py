"""Bounds the share of the event loop's time that work of one kind takes, if there is always more of it to do.

Messages for hundreds of streams could be made after each step of the engine. On a busy server that would take more time
than the steps. With a bound, the messages become fewer and larger instead, and the steps go on::

    busy  │ step │ messages │ step │ step │ step │ messages │ step │ …
    idle  │ step │ messages │      │ step │ messages │      │ step │ …

Time in which the loop has nothing to do is free for messages, so only a busy loop makes them wait.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIN_SLEEP_S = 0.0005


class LoopShare:
    """Gives turns to callers of one event loop, in order of arrival.

    The thread's CPU time tells how long the loop was busy. A loop that waits for a core counts as idle.

    max_share   of the loop's busy time that the turns take; they can have all of its idle time
    max_burst_s time that turns may take at once after a time without turns, so that a server that is not busy never
                makes them wait
    """

    def __init__(self, max_share: float = 0.25, max_burst_s: float = 0.004) -> None:
        self._max_share = max_share
        self._max_burst_s = max_burst_s
        self._credit_s = max_burst_s
        self._counted_s = self._counted_busy_s = 0.0  # when the credit was counted
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        """Returns when the caller may work. Work counts when it is done, so several callers can begin at once."""
        async with self._lock:
            self._count()
            while self._credit_s < 0:
                await asyncio.sleep(max(-self._credit_s, _MIN_SLEEP_S))
                self._count()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Counts the duration of the block, which must not wait."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            yield
        finally:
            self._credit_s -= loop.time() - started_s

    def _count(self) -> None:
        """Adds the time since the last call to the credit."""
        now_s, busy_s = asyncio.get_running_loop().time(), time.thread_time()
        passed_s = now_s - self._counted_s
        passed_busy_s = min(busy_s - self._counted_busy_s, passed_s)
        self._credit_s += passed_s - (1 - self._max_share) * passed_busy_s
        self._credit_s = min(self._credit_s, self._max_burst_s)
        self._counted_s, self._counted_busy_s = now_s, busy_s
