"""Detects an executor that makes no progress; the engine's readiness depends on it.

    plans in flight       the next result must arrive within step_timeout_s of the last one
    no plan in flight     the executor is probed every quarter of step_timeout_s, and has step_timeout_s to answer

A probe calls `quire.executor.v1.Executor/Describe`. The executor answers it on the device thread, because a process
whose device hangs could still answer on another one. A hang is therefore found within two step timeouts, even without
requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from scheduler.core import ExecutorLost

LivenessProbe = Callable[[], Awaitable[object]]
"""Asks the executor for an answer from its device. Raises ExecutorLost if none arrives in time."""


class ExecutorWatchdog:
    """Watches one plan stream.

    probe  called when no plan is in flight
    wake   called when there is a reason to call `check`
    """

    def __init__(self, probe: LivenessProbe, wake: Callable[[], None], step_timeout_s: float) -> None:
        self._probe = probe
        self._wake = wake
        self._step_timeout_s = step_timeout_s
        self._reset_at_s = time.monotonic()
        self._answer: asyncio.Future[object] | None = None

    def reset(self) -> None:
        """Restarts the timeout. Called when a result has arrived, and when a plan is sent with no other in flight."""
        self._reset_at_s = time.monotonic()

    def due_s(self, num_in_flight: int) -> float | None:
        """Returns the latest time to call `check`, or None if `wake` will be called instead."""
        if num_in_flight:
            return self._reset_at_s + self._step_timeout_s
        return self._reset_at_s + self._step_timeout_s / 4 if self._answer is None else None

    def check(self, num_in_flight: int) -> None:
        """Sends a probe if one is due. Call it when all results that have arrived are taken. Raises ExecutorLost."""
        silent_s = time.monotonic() - self._reset_at_s
        if self._answer is not None and self._answer.done():
            self._take_answer(self._answer, num_in_flight)
        elif num_in_flight:
            if silent_s >= self._step_timeout_s:
                raise ExecutorLost(f"no result for {self._step_timeout_s:g} s")
        elif self._answer is None and silent_s >= self._step_timeout_s / 4:
            self._answer = asyncio.ensure_future(self._probe())
            self._answer.add_done_callback(lambda _: self._wake())

    def close(self) -> None:
        if self._answer is not None:
            self._answer.cancel()

    def _take_answer(self, answer: asyncio.Future[object], num_in_flight: int) -> None:
        self._answer = None
        error = answer.exception()
        if error is None:
            self.reset()
        elif not num_in_flight:  # otherwise the probe may have waited behind plans, which have their own timeout
            raise error
