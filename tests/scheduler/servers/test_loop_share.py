"""Work that is always there takes its share of a busy loop and all of an idle one's time; after a quiet time it does
not wait."""

import asyncio
from typing import Any

import pytest

from scheduler.servers.loop_share import LoopShare


class Clock:
    """The time of the loop, which passes in work and in sleep only. `idle_share` of a sleep the thread is idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle_share: float = 0.0) -> None:
        self.now_s = 100.0
        self.busy_s = 50.0
        self.slept_s: list[float] = []
        self._idle_share = idle_share
        loop: Any = asyncio.get_running_loop()
        self._sleep = asyncio.sleep
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        monkeypatch.setattr("scheduler.servers.loop_share.time.thread_time", lambda: self.busy_s)
        monkeypatch.setattr("scheduler.servers.loop_share.asyncio.sleep", self.sleep)

    def pass_s(self, duration_s: float, idle_share: float = 0.0) -> None:
        self.now_s += duration_s
        self.busy_s += duration_s * (1 - idle_share)

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.pass_s(duration_s, self._idle_share)
        await self._sleep(0)

    async def work(self, share: LoopShare, duration_s: float) -> None:
        await share.turn()
        with share.work():
            self.pass_s(duration_s)


@pytest.mark.parametrize(
    ("idle_share", "taken_share"),
    [(0.0, 0.25), (0.5, 0.455), (1.0, 0.571)],
)
async def test_work_without_an_end_takes_its_share_of_the_busy_time_and_the_idle_time(
    idle_share: float, taken_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares solve taken = idle · other + 0.25 · ((1 - idle) · other + taken), and other = 1 - taken."""
    clock, share = Clock(monkeypatch, idle_share), LoopShare(max_share=0.25, max_burst_s=0.004)
    began_s = clock.now_s
    for _ in range(1000):
        await clock.work(share, 0.001)
    assert 1.0 / (clock.now_s - began_s) == pytest.approx(taken_share, rel=0.04)


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
        clock.pass_s(0.003)
    assert clock.slept_s == []


async def test_a_quiet_time_saves_up_no_more_than_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, share = Clock(monkeypatch), LoopShare(max_share=0.25, max_burst_s=0.004)
    clock.pass_s(3600, idle_share=1.0)
    for _ in range(5):
        await clock.work(share, 0.001)
    assert clock.slept_s == []
    for _ in range(2):
        await clock.work(share, 0.001)
    assert clock.slept_s


async def test_a_clock_of_the_thread_that_runs_ahead_costs_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, share = Clock(monkeypatch), LoopShare(max_share=0.25, max_burst_s=0.004)
    clock.busy_s += 1000.0
    await clock.work(share, 0.001)
    assert clock.slept_s == []


async def test_a_cancelled_wait_leaves_the_turn_to_others() -> None:
    share = LoopShare(max_share=0.25, max_burst_s=0.0)
    await share.turn()
    share._credit_s = -1000.0
    waiting = asyncio.create_task(share.turn())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    share._credit_s = 0.001
    async with asyncio.timeout(30):
        await share.turn()
