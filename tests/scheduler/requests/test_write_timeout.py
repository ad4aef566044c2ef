"""Writes that take too long are cancelled; waiting for something else is not."""

import asyncio
import time

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


async def test_a_write_has_its_time_from_its_own_begin() -> None:
    with pytest.raises(ReaderStalled):
        await wait_forever(0.1, idle_s=0.05)


async def test_a_pause_of_the_process_is_not_one_of_the_client() -> None:
    """The client accepts the message while this process is stopped, for longer than a client may take."""
    with WriteTimeout(0.1) as timeout:
        for _ in range(3):
            timeout.begin_write()
            accepted = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.01, accepted.set_result, None)
            asyncio.get_running_loop().call_soon(time.sleep, 0.25)
            await accepted
            timeout.end_write()


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
