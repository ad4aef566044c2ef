"""Drops HTTP connections whose clients read nothing of what waits for them: each holds a descriptor and its bytes."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from scheduler.telemetry.limits import STALLED_READERS, limited

NUM_LOOKS = 4
"""Looks within the limit. A client that reads anything changes the number of bytes that wait until the next look."""


class StalledConnections:
    """Looks at all connections several times within `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # the number of bytes that waited at the last look, and the looks since it has been this number
        self._seen: WeakKeyDictionary[asyncio.Transport, tuple[int, int]] = WeakKeyDictionary()
        self._task: asyncio.Task[None] | None = None

    def add(self, transport: asyncio.Transport) -> None:
        self._seen[transport] = 0, 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="stalled connections")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._limit_s / NUM_LOOKS)
            for transport, (before, num_looks) in list(self._seen.items()):
                num_waiting = transport.get_write_buffer_size()
                num_looks = num_looks + 1 if num_waiting and num_waiting == before else 0
                self._seen[transport] = num_waiting, num_looks
                if num_looks == NUM_LOOKS:
                    limited(STALLED_READERS)
                    transport.abort()  # aiohttp would wait for the client, also after it has closed the connection
