"""Calls that prepare a request, such as tokenizing its prompt, survive the loss of a scheduler as its stream does."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from quire.errors import UnavailableError
from quire.status import is_lost_connection
from quire.tries import FIRST_PAUSE_S, LONGEST_PAUSE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.schedulers.scheduler import Scheduler


async def ask_any(
    choose: Callable[[], Scheduler], call: Callable[[Scheduler], Awaitable[Any]], timeout_s: float
) -> Any:
    """Returns the answer of a scheduler. After one was lost or has refused, asks the next one, or the same one later.

    choose     returns the scheduler to ask now
    timeout_s  time in which it is asked again; only one that was there is expected back

    Raises QuireError.
    """
    ends_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while True:
        scheduler = choose()
        try:
            return await call(scheduler)
        except UnavailableError as error:
            was_there = scheduler.info is not None or is_lost_connection(error)
            if not was_there or time.monotonic() >= ends_s:
                raise
        if choose() is scheduler:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
