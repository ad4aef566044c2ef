"""How long a reader may take for one message."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

from scheduler.requests.status import ReaderStalled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from quire.v1 import generation_pb2 as wire
    from scheduler.requests.response_stream import ResponseStream


async def deliver(
    stream: ResponseStream, write: Callable[[wire.GenerateResponse], Awaitable[Any]], limit_s: float
) -> None:
    """Writes every message of a stream, whatever the door. Raises ReaderStalled if one takes longer than `limit_s`."""
    with Patience(limit_s) as patience:
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                patience.starts()
                await write(message)
                patience.ends()


class Patience:
    """A context around the work of one task, which marks what must not take longer than `limit_s`: `starts`, `ends`.

    What does is cancelled, and the context raises ReaderStalled. As asyncio.timeout, but nothing is scheduled anew
    for each message: the timer is set once, and looks when it rings whether it rang too early.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._has_run_out = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def __enter__(self) -> Self:
        self._num_cancels = self._task.cancelling() if self._task is not None else 0
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if not self._has_run_out or self._task is None:
            return
        # Cancelled from outside as well? Then that comes first.
        if self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise ReaderStalled(f"nothing was taken for {self._limit_s} s") from None

    def starts(self) -> None:
        self._since_s = self._loop.time()

    def ends(self) -> None:
        self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + self._limit_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
        elif self._task is not None:
            self._has_run_out = True
            self._task.cancel()
