"""Lets large bodies be parsed one after the other, so that the event loop has pauses between them.

The scheduler has turns for more kinds of tasks (`scheduler.text.turns`), but a gateway that serves HTTP alone imports
nothing of it.
"""

from __future__ import annotations

import asyncio
from collections import deque


class ParsingTurns:
    """One body is parsed at a time. Network addresses take turns (round robin). Used from one event loop."""

    def __init__(self) -> None:
        self._is_free = True
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the first one is served next; none is empty

    async def take(self, address: str) -> None:
        """Returns when a body of this address may be parsed. `end` lets the next one be parsed."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(address, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given in the same iteration of the loop
                self.end()
            raise

    def end(self) -> None:
        self._is_free = True
        self._serve()

    def _serve(self) -> None:
        while self._is_free and self._queues:
            address = next(iter(self._queues))
            queue = self._queues.pop(address)
            turn = queue.popleft()
            if queue:
                self._queues[address] = queue  # behind all others
            if not turn.done():  # its request was not cancelled
                self._is_free = False
                turn.set_result(None)
