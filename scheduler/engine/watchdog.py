"""Whether the executor gets on: what the engine's readiness follows.

    a plan is out    the next result comes within step_timeout_s of the last one
    none is out      the executor is asked, every quarter of step_timeout_s, and has step_timeout_s for the answer

An executor is asked to describe itself, which its device answers (`quire.executor.v1.Executor/Describe`): a process
that stands still says nothing, and neither does one whose device hangs, while its servers would still tell how well it
is. So a hang is found out within two step time-outs, also when nobody wants anything.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from scheduler.core import ExecutorLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Progress:
    """Of one plan stream.

    ask   raises ExecutorLost when there is no answer in time
    wake  called when there is reason to call `check`
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], wake: Callable[[], None], step_timeout_s: float) -> None:
        self._ask = ask
        self._wake = wake
        self._step_timeout_s = step_timeout_s
        self._moved_s = time.monotonic()
        self._question: asyncio.Future[object] | None = None

    def moved(self) -> None:
        """A result is in, or the first plan of several goes out."""
        self._moved_s = time.monotonic()

    def due_s(self, num_in_flight: int) -> float | None:
        """When to call `check` at the latest; None: `wake` will say so."""
        if num_in_flight:
            return self._moved_s + self._step_timeout_s
        return self._moved_s + self._step_timeout_s / 4 if self._question is None else None

    def check(self, num_in_flight: int) -> None:
        """Asks, if it is time. Call it when all results that are in have been taken. Raises ExecutorLost."""
        silent_s = time.monotonic() - self._moved_s
        if self._question is not None and self._question.done():
            self._hear(self._question, num_in_flight)
        elif num_in_flight:
            if silent_s >= self._step_timeout_s:
                raise ExecutorLost(f"no result for {self._step_timeout_s:g} s")
        elif self._question is None and silent_s >= self._step_timeout_s / 4:
            self._question = asyncio.ensure_future(self._ask())
            self._question.add_done_callback(lambda _: self._wake())

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()

    def _hear(self, question: asyncio.Future[object], num_in_flight: int) -> None:
        self._question = None
        error = question.exception()
        if error is None:
            self.moved()
        elif not num_in_flight:  # the question may have waited behind plans, each of which had its time
            raise error
