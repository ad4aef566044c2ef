"""Drops clients that read their answer too slowly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import hdrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

_INTERVAL_S = 0.25


_MAX_BUFFERED = 16 << 10
"""Bytes that may wait for a client to read when `write_now` adds some."""


class Reader:
    """Writes to one client. aiohttp buffers about 128 KiB for it, then `write` waits until the client reads on."""

    __slots__ = ("_loop", "_response", "_transport", "blocked_since_s")

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._response = response
        self._transport = request.transport
        self._loop = asyncio.get_running_loop()
        self.blocked_since_s: float | None = None

    async def write(self, text: str) -> None:
        """Raises ConnectionResetError if the client has gone."""
        self.blocked_since_s = self._loop.time()
        await self._response.write(text.encode())
        self.blocked_since_s = None

    @property
    def is_free(self) -> bool:
        """True if `write_now` may be called: the response has begun in chunks, and its client reads fast enough."""
        transport = self._transport
        return (
            transport is not None
            and self.blocked_since_s is None
            and self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
            and transport.get_write_buffer_size() < _MAX_BUFFERED
        )

    def write_now(self, text: str) -> None:
        """Writes a chunk of HTTP/1.1 (RFC 9112, section 7.1), without what aiohttp does for each. Raises
        ConnectionResetError if the client has gone."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        data = text.encode()
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def drop(self) -> None:
        """Closes the connection at once, which cancels the handler."""
        if self._transport is not None:
            self._transport.abort()


class SlowReaders:
    """Looks at all readers a few times a second. A timer for each chunk would cost more than the chunk."""

    def __init__(self, limit_s: float, on_drop: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_drop = on_drop
        self._readers: set[Reader] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="slow readers")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def add(self, reader: Reader) -> None:
        self._readers.add(reader)

    def remove(self, reader: Reader) -> None:
        self._readers.discard(reader)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_INTERVAL_S, self._limit_s))
            latest_s = loop.time() - self._limit_s
            for reader in list(self._readers):
                if reader.blocked_since_s is not None and reader.blocked_since_s < latest_s:
                    self._readers.discard(reader)
                    self._on_drop()
                    reader.drop()
