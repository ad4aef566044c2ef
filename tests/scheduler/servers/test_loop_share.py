"""Work that is always there takes its share of the time and no more, and work after a quiet time does not wait."""

import asyncio
from typing import Any

import pytest

from scheduler.servers.loop_share import LoopShare


class Clock:
    """The time of the loop, which passes in work and in sleep only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        loop: Any = asyncio.get_running_loop()
        self._sleep = asyncio.sleep
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        monkeypatch.setattr("scheduler.servers.loop_share.asyncio.sleep", self.sleep)

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s
        await self._sleep(0)

    async def work(self, share: LoopShare, duration_s: float) -> None:
        async with share.turn():
            self.now_s += duration_s


async def test_work_without_an_end_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, share = Clock(monkeypatch), LoopShare(max_share=0.25, max_burst_s=0.004)
    began_s = clock.now_s
    for _ in range(1000):
        await clock.work(share, 0.001)
    assert 1.0 / (clock.now_s - began_s) == pytest.approx(0.25, rel=0.01)


async def test_callers_share_the_time_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, share = Clock(monkeypatch), LoopShare(max_share=0.25, max_burst_s=0.004)
    order: list[int] = []

    async def caller(number: int) -> None:
        for _ in range(50):
            await clock.work(share, 0.002)
            order.append(number)

    began_s = clock.now_s
    await asyncio.gather(*[caller(number) for number in range(4)])
    assert 0.4 / (clock.now_s - began_s) == pytest.approx(0.25, rel=0.03)
    middle = order[20:180]
    assert all(len(set(middle[i : i + 4])) == 4 for i in range(0, 160, 4)), "each has one turn before the next round"


async def test_work_that_stays_below_its_share_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, share = Clock(monkeypatch), LoopShare(max_share=0.25, max_burst_s=0.004)
    for _ in range(100):
        await clock.work(share, 0.001)
        clock.now_s += 0.003
    assert clock.slept_s == []


async def test_a_quiet_time_saves_up_no_more_than_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, share = Clock(monkeypatch), LoopShare(max_share=0.25, max_burst_s=0.004)
    clock.now_s += 3600
    for _ in range(5):
        await clock.work(share, 0.001)
    assert clock.slept_s == []
    for _ in range(2):
        await clock.work(share, 0.001)
    assert len(clock.slept_s) == 1


async def test_a_cancelled_wait_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    share = LoopShare(max_share=0.25, max_burst_s=0.0)
    async with share.turn():
        pass
    share._credit_s = -1000.0
    waiting = asyncio.create_task(share.turn().__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    share._credit_s = 0.001
    async with asyncio.timeout(30), share.turn():
        pass
