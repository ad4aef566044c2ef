"""Limits the time that a client may take to accept one message."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

from scheduler.requests.status import ReaderStalled
from scheduler.telemetry.limits import STALLED_READERS, limited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from quire.v1 import generation_pb2 as pb
    from scheduler.requests.response_stream import ResponseStream

NUM_LOOKS = 4
"""Looks at a write within the limit. It fails between 1 and 1 + 1 / NUM_LOOKS times the limit after its begin."""


async def deliver(
    stream: ResponseStream, write: Callable[[pb.GenerateResponse], Awaitable[Any]], limit_s: float
) -> None:
    """Writes every message of a stream. Raises ReaderStalled if one write takes longer than `limit_s`."""
    with WriteTimeout(limit_s) as timeout:
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                timeout.begin_write()
                await write(message)
                timeout.end_write()


class WriteTimeout:
    """A context that cancels its task and raises ReaderStalled if one write takes longer than `limit_s`.

    It works like asyncio.timeout, but does not schedule a timer for each message. One timer looks several times within
    the limit whether the same write is still under way, and the write has failed after NUM_LOOKS of them. A process
    that was stopped for a while misses at most one look, so it does not take its own pause for that of its client.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._writing: object | None = None
        self._seen: object | None = None
        self._num_looks = 0  # at `_seen`, after the first one
        self._has_expired = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def __enter__(self) -> Self:
        self._num_cancels = self._task.cancelling() if self._task is not None else 0
        self._look_later()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if not self._has_expired or self._task is None:
            return
        # A cancellation from outside takes precedence.
        if self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            limited(STALLED_READERS)
            raise ReaderStalled(f"the client accepted no message for {self._limit_s} s") from None

    def begin_write(self) -> None:
        self._writing = object()

    def end_write(self) -> None:
        self._writing = None

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / NUM_LOOKS, self._look)

    def _look(self) -> None:
        is_same = self._writing is not None and self._writing is self._seen
        self._num_looks = self._num_looks + 1 if is_same else 0
        self._seen = self._writing
        if self._num_looks < NUM_LOOKS:
            self._look_later()
        elif self._task is not None:
            self._has_expired = True
            self._task.cancel()
