"""Processes in one event loop: tasks, callbacks and timers belong to the process that created them, which can stop.

A stopped process is one that got SIGSTOP: nothing of it runs, and what was due runs when it goes on. A process that is
killed is cut off from all others first (`SchedulerProcess.die`); then its tasks are cancelled.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.virtual_time import SimulatedLoop

if TYPE_CHECKING:
    from collections.abc import Callable

CURRENT: ContextVar[SimulatedProcess | None] = ContextVar("CURRENT", default=None)
OUTSIDE = Context()
"""The context of what belongs to no process, such as messages under way."""


class SimulatedProcess:
    """The tasks of one process. Run what belongs to it in `context`."""

    def __init__(self) -> None:
        self.context = Context()
        self.context.run(CURRENT.set, self)
        self.is_alive = True
        self.is_stopped = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._parked: list[tuple[Callable[[], bool], Callable[..., object], tuple[Any, ...], Context | None]] = []

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)

    def park(
        self, is_cancelled: Callable[[], bool], callback: Callable[..., object], args: tuple[Any, ...], context: Any
    ) -> None:
        self._parked.append((is_cancelled, callback, args, context))

    def go_on(self) -> None:
        """Undoes a stop."""
        self.is_stopped = False
        parked, self._parked = self._parked, []
        for is_cancelled, callback, args, context in parked:
            if not is_cancelled():
                asyncio.get_running_loop().call_soon(callback, *args, context=context)

    def end(self) -> None:
        """Cancels all tasks."""
        self.is_alive = False
        self.go_on()
        for task in self._tasks:
            task.cancel()


class ProcessLoop(SimulatedLoop):
    """A loop that holds back what belongs to a stopped process."""

    def __init__(self, max_turns: int) -> None:
        super().__init__(max_turns)
        self.set_task_factory(_new_task)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        process = CURRENT.get() if context is None else context.get(CURRENT)
        if process is None or not process.is_stopped:
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        process.park(handle.cancelled, callback, args, context)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = CURRENT.get() if context is None else context.get(CURRENT)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        timer: list[asyncio.TimerHandle] = []
        timer.append(super().call_at(when, partial(_due, process, timer, callback, args, context), context=context))
        return timer[0]


def _due(
    process: SimulatedProcess,
    timer: list[asyncio.TimerHandle],
    callback: Callable[..., object],
    args: tuple[Any, ...],
    context: Context | None,
) -> None:
    if process.is_stopped:
        process.park(timer[0].cancelled, callback, args, context)
    else:
        callback(*args)


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    process = CURRENT.get() if context is None else context.get(CURRENT)
    if process is not None:
        process.add(task)
    return task
