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

    It works like asyncio.timeout, but does not schedule a timer for each message: one timer is set, and when it fires
    it is set again if the current write has time left.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s: float | None = None
        self._has_expired = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def __enter__(self) -> Self:
        self._num_cancels = self._task.cancelling() if self._task is not None else 0
        self._timer = self._loop.call_later(self._limit_s, self._check)
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
        self._began_s = self._loop.time()

    def end_write(self) -> None:
        self._began_s = None

    def _check(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._began_s is None else self._began_s) + self._limit_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._check)
        elif self._task is not None:
            self._has_expired = True
            self._task.cancel()
