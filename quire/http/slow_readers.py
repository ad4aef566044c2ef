"""Drops HTTP clients that do not read what waits for them: each holds a descriptor and its bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

_INTERVAL_S = 1.0


class Stream(Protocol):
    """An answer that is written bit by bit, often without waiting for its client.

    connection  of the client
    is_blocked  a write waits for the client to read
    """

    connection: web.RequestHandler
    is_blocked: bool


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
        self._streams: dict[web.RequestHandler, Stream] = {}
        self._dropped: set[web.RequestHandler] = set()  # those that have not closed yet
        self._task: asyncio.Task[None] | None = None

    def start(self, server: web.Server) -> None:
        self._task = asyncio.create_task(self._watch(server), name="slow readers")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def add(self, stream: Stream) -> None:
        """Called when a stream begins."""
        self._streams[stream.connection] = stream

    def remove(self, stream: Stream) -> None:
        """Called when it ends."""
        self._streams.pop(stream.connection, None)

    def has_dropped(self, connection: web.RequestHandler) -> bool:
        """Returns whether a connection that has just ended was dropped, and its client did not go away."""
        return connection in self._dropped

    async def _watch(self, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_INTERVAL_S, self._limit_s))
            self._look(server.connections, loop.time())

    def _look(self, connections: list[web.RequestHandler], now_s: float) -> None:
        for closed in self._progress.keys() - set(connections):
            del self._progress[closed]
            self._dropped.discard(closed)
        for connection in connections:
            progress = self._progress.get(connection)
            if progress is None and connection.transport is not None:
                progress = self._progress[connection] = _Progress(connection.transport, 0, now_s)
            if progress is not None and self._has_stalled(progress, self._streams.get(connection), now_s):
                progress.since_s = now_s
                self._dropped.add(connection)
                self._on_drop()
                progress.transport.abort()  # this cancels the handler

    def _has_stalled(self, progress: _Progress, stream: Stream | None, now_s: float) -> bool:
        num_waiting = progress.transport.get_write_buffer_size()
        is_streaming = stream is not None and not stream.is_blocked
        if is_streaming or not num_waiting or num_waiting < progress.num_waiting:
            progress.since_s = now_s
        progress.num_waiting = num_waiting
        return now_s - progress.since_s > self._limit_s
