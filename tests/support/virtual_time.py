"""An event loop whose clock does not wait: when no task can run, it jumps to the next timer."""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


class TooManyTurns(BaseException):
    """The loop has run for longer than any world needs: some tasks wake each other for ever."""


class Stuck(RuntimeError):
    """Every task waits for something that no timer brings."""


class _Selector(selectors.DefaultSelector):
    """Adds the time that a caller would wait to `now_s`, and `tick_s` for each turn, and returns at once."""

    now_s = 0.0
    tick_s = 0.0
    num_turns_left: float = float("inf")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.num_turns_left -= 1
        if self.num_turns_left < 0:
            raise TooManyTurns
        self.now_s += self.tick_s
        if timeout is not None and timeout <= 0 and self.tick_s:
            return []  # a simulation has no files
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Stuck("every task waits for something that no timer brings")
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time()` begins at 0, and asyncio.sleep(3600) returns immediately, an hour later."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


class SimulatedLoop(VirtualTimeLoop):
    """A loop for a simulation without threads. Each turn takes a microsecond, so that a task that polls the clock
    proceeds. Raises TooManyTurns after `max_turns`."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        self._clock.now_s, self._clock.tick_s = 1000.0, 1e-6
        self.allow(max_turns)

    def allow(self, num_turns: int) -> None:
        """Has the loop raise TooManyTurns after this number of further turns."""
        self._clock.num_turns_left = num_turns

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
        return self.call_soon(callback, *args, **kwargs)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on a loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


@contextmanager
def clocks_of(loop: asyncio.AbstractEventLoop, wall_s: Callable[[], float]) -> Iterator[None]:
    """Lets the clocks of module `time` show the loop's time, and `time.time` that of `wall_s`."""

    own_thread, real_sleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        if threading.get_ident() == own_thread:
            raise AssertionError("a simulated task blocks its thread")
        real_sleep(seconds)  # a thread of an earlier test

    functions: dict[str, Callable[..., object]] = {
        "monotonic": loop.time,
        "perf_counter": loop.time,
        "monotonic_ns": lambda: int(loop.time() * 1e9),
        "perf_counter_ns": lambda: int(loop.time() * 1e9),
        "time": wall_s,
        "time_ns": lambda: int(wall_s() * 1e9),
        "sleep": sleep,
    }
    with ExitStack() as patches:
        for name, function in functions.items():
            patches.enter_context(patch.object(time, name, function))
        yield
