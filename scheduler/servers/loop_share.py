"""Bounds the share of the event loop's time that work of one kind takes, if there is always more of it to do.

Messages for hundreds of streams could be made after each step of the engine. On a busy server that would take more time
than the steps. With a bound, the messages become fewer and larger instead, and the steps go on::

    loop  │ step │ messages │ step │ step │ step │ messages │ step │ …
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class LoopShare:
    """Gives turns to callers of one event loop, in order of arrival.

    max_share   of the loop's time that the turns take
    max_burst_s time that turns may take at once after a time without turns, so that a server that is not busy never
                makes them wait
    """

    def __init__(self, max_share: float = 0.25, max_burst_s: float = 0.004) -> None:
        self._max_share = max_share
        self._max_burst_s = max_burst_s
        self._credit_s = max_burst_s
        self._counted_s = 0.0  # when the credit was counted
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for the caller's turn. The block must not wait, because its duration counts."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            now_s = loop.time()
            self._credit_s += self._max_share * (now_s - self._counted_s)
            self._credit_s = min(self._credit_s, self._max_burst_s)
            self._counted_s = now_s
            if self._credit_s < 0:
                await asyncio.sleep(-self._credit_s / self._max_share)
            started_s = loop.time()
            try:
                yield
            finally:
                self._credit_s -= loop.time() - started_s
