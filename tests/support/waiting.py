"""Helpers that wait for a condition that no event announces, such as the state of another thread or process."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

WAIT_S = 30.0
"""Far more than any condition takes, also on a slow machine that is busy with something else."""

_LONGEST_PAUSE_S = 0.1


async def until(
    condition: Callable[[], object | Awaitable[object]],
    timeout_s: float = WAIT_S,
    *,
    what: str = "",
    interval_s: float = 0.001,
) -> None:
    """Returns when `condition()` is true; a condition that returns an awaitable is awaited.

    Raises TimeoutError with a message that names `what` after `timeout_s`.

    Each look costs CPU time, often also in the process that is waited for. The pauses between them therefore grow from
    `interval_s` to a tenth of the time that has passed, but not beyond 0.1 s.
    """
    start_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            while not await _result_of(condition):  # noqa: ASYNC110 - no event announces the condition
                await asyncio.sleep(_pause_s(start_s, interval_s))
    except TimeoutError:
        raise TimeoutError(_message(condition, timeout_s, what)) from None


def wait_until(
    condition: Callable[[], object], timeout_s: float = WAIT_S, *, what: str = "", interval_s: float = 0.001
) -> None:
    """Returns when `condition()` is true, for tests without an event loop. Raises TimeoutError as `until` does."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() > start_s + timeout_s:
            raise TimeoutError(_message(condition, timeout_s, what))
        time.sleep(_pause_s(start_s, interval_s))


def _pause_s(start_s: float, interval_s: float) -> float:
    return max(interval_s, min((time.monotonic() - start_s) / 10, _LONGEST_PAUSE_S))


async def _result_of(condition: Callable[[], object | Awaitable[object]]) -> object:
    result = condition()
    return await result if inspect.isawaitable(result) else result


def _message(condition: Callable[[], object], timeout_s: float, what: str) -> str:
    return f"not within {timeout_s:g} s: {what or condition}"
