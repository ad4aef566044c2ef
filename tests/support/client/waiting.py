"""Waits for other threads and processes."""

import asyncio
from collections.abc import Callable

WAIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition is true. Raises TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another thread or process cannot set an event of this loop
            await asyncio.sleep(0.01)
