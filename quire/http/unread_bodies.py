"""Answers HTTP requests whose bodies were not read to their end.

A client reads the answer only when it has sent its whole body, so the rest has to be read as well. aiohttp reads it for
ten seconds, as fast as it comes. Clients whose bodies do not end would then take all the time of the event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import web

DISCARD_S = 2.0
"""Time for which the rest of a body is read after its request was answered."""

PAUSE_S = 0.1
"""Pause after each piece of a body."""

PIECES_PER_S = 100
"""Pieces that one server reads in a second, those of all bodies together. A piece takes 0.1 to 0.2 ms."""


class UnreadBodies:
    """The bodies that one server has not read, and does not need."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def discard(self, request: web.Request, response: web.StreamResponse) -> None:
        """Sends the answer and reads the rest of the body slowly, if there is any. Then the connection closes."""
        if request.content.is_eof():
            return
        response.force_close()
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        with suppress(TimeoutError, OSError, web.RequestPayloadError):
            async with asyncio.timeout(DISCARD_S):
                while not request.content.at_eof():
                    async with self._turn:
                        await asyncio.sleep(1 / PIECES_PER_S)
                    await request.content.readany()
                    await asyncio.sleep(PAUSE_S)
        if not request.content.is_eof():
            request.protocol.force_close()  # aiohttp would read on if only the transport were closed
