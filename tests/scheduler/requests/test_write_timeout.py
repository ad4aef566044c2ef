"""What takes too long is cancelled; what waits for something else, or ends in time, is not."""

import asyncio

import pytest

from scheduler.requests.status import ReaderStalled
from scheduler.requests.write_timeout import Patience


async def wait_forever(limit_s: float, idle_s: float = 0.0) -> None:
    with Patience(limit_s) as patience:
        await asyncio.sleep(idle_s)
        patience.starts()
        await asyncio.Event().wait()


async def test_what_never_ends() -> None:
    with pytest.raises(ReaderStalled, match=r"nothing was taken for 0\.02 s"):
        await wait_forever(0.02)
    await asyncio.sleep(0)  # not cancelled any more


async def test_time_between_is_not_counted() -> None:
    with Patience(0.02) as patience:
        for _ in range(4):
            patience.starts()
            patience.ends()
            await asyncio.sleep(0.03)


async def test_it_looks_again_when_the_timer_rang_too_early() -> None:
    with pytest.raises(ReaderStalled):
        await wait_forever(0.1, idle_s=0.05)


async def test_a_cancel_from_outside_stays_one() -> None:
    task = asyncio.create_task(wait_forever(60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_pass() -> None:
    async def fail() -> None:
        with Patience(60) as patience:
            patience.starts()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
