"""The open requests of a server: how many there are, and the end of the last one."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.schedulers.waiting import RETRY_AFTER_S
from quire.errors import QueueFullError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


class OpenRequests:
    """Counts the open requests of one server. It refuses more than `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False

    def __len__(self) -> int:
        return self._num_open

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests, and waits until the open ones have ended. Returns False if they have not in time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request while it is open. Raises UnavailableError during a drain, and QueueFullError."""
        if self.is_draining:
            raise UnavailableError("the gateway is draining")
        if self._num_open >= self._most:
            raise QueueFullError(f"the gateway has {self._most} open requests", RETRY_AFTER_S)
        self._num_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()
