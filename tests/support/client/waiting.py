"""Waiting for what another thread or process does."""

import asyncio
from collections.abc import Callable

WAIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it is so; a failure after a time in which it surely should be."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for cannot set an event of this loop
            await asyncio.sleep(0.01)
