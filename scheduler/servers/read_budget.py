"""Bounds the share of the event loop's time that reads such as metrics and step traces may take.

A read of Prometheus costs a millisecond every few seconds. A client in a loop could ask for it all the time, and every
request of every other client would wait. So reads take turns, and after each the next one waits in proportion to what
the last one cost::

    read ████ 4 ms ─────────── at least 36 ms ─────────── read ████
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scheduler.core import QueueFull
from scheduler.telemetry.limits import READS, limited

_MAX_SHARE = 0.1
_LEAST_COST_S = 200e-6
"""Cost of the connection's own work for a request (parsing and writing), which is not measured."""


class ReadBudget:
    """Gives reads their turns, in the order in which they arrive.

    max_waiting: reads beyond this number are refused while so many wait; None: none is refused
    """

    def __init__(self, max_share: float = _MAX_SHARE, max_waiting: int | None = 64) -> None:
        self._pause_factor = 1 / max_share - 1
        self._max_waiting = max_waiting
        self._lock = asyncio.Lock()
        self._not_before_s = 0.0
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for the read's turn. Raises QueueFull if too many reads wait already.

        The block must not wait: its duration is taken for the time that the loop was busy with it.
        """
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            limited(READS)
            raise QueueFull(f"{self._max_waiting} reads are waiting for their turn")
        self._num_waiting += 1
        try:
            async with self._lock:
                if (pause_s := self._not_before_s - time.monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                started_s = time.monotonic()
                try:
                    yield
                finally:
                    ended_s = time.monotonic()
                    self._not_before_s = ended_s + self._pause_factor * max(_LEAST_COST_S, ended_s - started_s)
        finally:
            self._num_waiting -= 1
