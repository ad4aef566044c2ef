"""Writes that take too long are cancelled; waiting for something else is not."""

import asyncio

import pytest

from scheduler.requests.status import ReaderStalled
from scheduler.requests.write_timeout import WriteTimeout
from scheduler.telemetry.limits import STALLED_READERS
from tests.support.scheduler.limits import counted


async def wait_forever(limit_s: float, idle_s: float = 0.0) -> None:
    with WriteTimeout(limit_s) as timeout:
        await asyncio.sleep(idle_s)
        timeout.begin_write()
        await asyncio.Event().wait()


async def test_write_that_never_ends_raises_reader_stalled() -> None:
    message = r"the client accepted no message for 0\.02 s"
    with counted(STALLED_READERS), pytest.raises(ReaderStalled, match=message):
        await wait_forever(0.02)
    await asyncio.sleep(0)  # the task is no longer cancelled


async def test_time_between_writes_does_not_count() -> None:
    with WriteTimeout(0.02) as timeout:
        for _ in range(4):
            timeout.begin_write()
            timeout.end_write()
            await asyncio.sleep(0.03)


async def test_timer_is_set_again_if_it_fires_too_early() -> None:
    with pytest.raises(ReaderStalled):
        await wait_forever(0.1, idle_s=0.05)


async def test_cancellation_from_outside_is_not_a_timeout() -> None:
    task = asyncio.create_task(wait_forever(60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_of_a_write_are_raised() -> None:
    async def fail() -> None:
        with WriteTimeout(60) as timeout:
            timeout.begin_write()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
