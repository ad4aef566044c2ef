"""Waiting for another process: `tests.support.waiting` with a long timeout and slow polling."""

from collections.abc import Awaitable, Callable

from tests.support import waiting

WAIT_S = 120.0
"""Far more than anything in these tests takes, even on a slow machine that is busy with something else."""

_INTERVAL_S = 0.01  # each poll costs the other process CPU time


async def until(condition: Callable[[], Awaitable[object]], what: str = "") -> None:
    """Returns when `condition()` is true. Raises TimeoutError with a message that names `what`."""
    await waiting.until(condition, WAIT_S, what=what, interval_s=_INTERVAL_S)
