"""Waiting for what another process does: asked again and again, and given up only when it surely should be so."""

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 120.0
"""Far more than anything here takes, even on a slow machine that does other things as well."""


async def until(condition: Callable[[], Awaitable[object]], what: str = "") -> None:
    """Returns when `condition()` is true. Raises TimeoutError that says what was waited for."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not await condition():  # noqa: ASYNC110 - another process sets no event of this loop
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TimeoutError(f"not within {WAIT_S:g} s: {what or condition}") from None
