"""Drops clients that do not read their answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import hdrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

_INTERVAL_S = 1.0

_MAX_BUFFERED = 16 << 10
"""Bytes that may wait for a client to read when `write_now` adds some."""


class Reader:
    """Writes to one client. aiohttp buffers about 128 KiB for it, then `write` waits until the client reads on.

    connection  of the client
    is_blocked  `write` waits
    """

    __slots__ = ("_response", "_transport", "connection", "is_blocked")

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._response = response
        self._transport = request.transport
        self.connection = request.protocol
        self.is_blocked = False

    async def write(self, text: str) -> None:
        """Raises ConnectionResetError if the client has gone."""
        self.is_blocked = True
        await self._response.write(text.encode())
        self.is_blocked = False

    @property
    def is_free(self) -> bool:
        """True if `write_now` may be called: the response has begun in chunks, and its client reads fast enough."""
        transport = self._transport
        return (
            transport is not None
            and not self.is_blocked
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


@dataclass(slots=True)
class _Progress:
    """The progress of the client of one connection.

    transport    aiohttp forgets it when it closes the connection, even if bytes still wait
    num_waiting  bytes that waited for the client at the last look
    since_s      time since which it has read none of them
    """

    transport: asyncio.Transport
    num_waiting: int
    since_s: float


class SlowReaders:
    """Looks at all connections once a second. A timer for each chunk would cost more than the chunk.

    A client is dropped if bytes wait for it and it reads none of them for the time. Within a stream, new bytes hide how
    many it reads. So these bytes count only while a write waits for the client, or after the end of the stream.
    """

    def __init__(self, limit_s: float, on_drop: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_drop = on_drop
        self._progress: dict[web.RequestHandler, _Progress] = {}
        self._streams: dict[web.RequestHandler, Reader] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, server: web.Server) -> None:
        self._task = asyncio.create_task(self._watch(server), name="slow readers")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def add(self, reader: Reader) -> None:
        """Called when a stream begins."""
        self._streams[reader.connection] = reader

    def remove(self, reader: Reader) -> None:
        """Called when it ends."""
        self._streams.pop(reader.connection, None)

    async def _watch(self, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_INTERVAL_S, self._limit_s))
            self._look(server.connections, loop.time())

    def _look(self, connections: list[web.RequestHandler], now_s: float) -> None:
        for closed in self._progress.keys() - set(connections):
            del self._progress[closed]
        for connection in connections:
            progress = self._progress.get(connection)
            if progress is None and connection.transport is not None:
                progress = self._progress[connection] = _Progress(connection.transport, 0, now_s)
            if progress is not None and self._has_stalled(progress, self._streams.get(connection), now_s):
                progress.since_s = now_s
                self._on_drop()
                progress.transport.abort()  # this cancels the handler

    def _has_stalled(self, progress: _Progress, stream: Reader | None, now_s: float) -> bool:
        num_waiting = progress.transport.get_write_buffer_size()
        is_streaming = stream is not None and not stream.is_blocked
        if is_streaming or not num_waiting or num_waiting < progress.num_waiting:
            progress.since_s = now_s
        progress.num_waiting = num_waiting
        return now_s - progress.since_s > self._limit_s
