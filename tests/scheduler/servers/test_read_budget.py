"""Reads take turns, and pause in proportion to what they cost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import aiohttp
import grpc.aio
import pytest

from quire.v1.admin_pb2 import GetBlockMapRequest, GetStepTraceRequest
from scheduler.core import QueueFull
from scheduler.servers import read_budget
from scheduler.servers.http_server import HttpServer
from scheduler.servers.read_budget import ReadBudget
from scheduler.telemetry.limits import READS
from tests.support.scheduler.limits import counted

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine
    from tests.support.scheduler.servers import Servers


class Clock:
    """A clock that only moves when something sleeps or works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(read_budget.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(read_budget.asyncio, "sleep", self._sleep)

    async def _sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


async def test_reads_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), ReadBudget(max_share=0.1)
    for _ in range(20):
        async with budget.turn():
            clock.now_s += 0.004
    assert clock.now_s - 100.0 == pytest.approx(20 * 0.004 + 19 * 0.036)


async def test_a_read_after_a_pause_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), ReadBudget()
    for _ in range(3):
        before_s = clock.now_s
        async with budget.turn():
            assert clock.now_s == before_s
            clock.now_s += 0.01
        clock.now_s += 1.0


async def test_reads_without_measurable_cost_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budget = Clock(monkeypatch), ReadBudget(max_share=0.1)
    for _ in range(1000):
        async with budget.turn():
            pass
    assert clock.now_s - 100.0 >= 999 * 9 * 200e-6 * 0.99


async def test_too_many_waiting_reads_are_refused_and_the_others_get_their_turn() -> None:
    budget, num_done = ReadBudget(max_waiting=2), 0

    async def read() -> None:
        nonlocal num_done
        async with budget.turn():
            num_done += 1

    with counted(READS, 3):
        async with budget.turn():  # one of the two that may wait
            reads = [asyncio.create_task(read()) for _ in range(4)]
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None)] + [QueueFull] * 3
    await read()
    assert num_done == 2


async def test_a_cancelled_read_gives_its_turn_to_the_next() -> None:
    budget = ReadBudget(max_waiting=None)
    async with budget.turn():
        waiting = asyncio.create_task(budget.turn().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with budget.turn():
        pass


async def test_costly_reads_take_turns(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may wait in these budgets, so that each read that takes a turn is refused."""
    for module in ("admin_server", "http_server"):
        monkeypatch.setattr(f"scheduler.servers.{module}.ReadBudget", lambda **_: ReadBudget(max_waiting=0))
    served = await servers.start()
    for call in (served.admin.GetBlockMap(GetBlockMapRequest()), served.admin.GetStepTrace(GetStepTraceRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    http = HttpServer(cast("Engine", served.engine), servers.metrics)
    await http.start("127.0.0.1:0")
    try:
        async with aiohttp.ClientSession(f"http://{http.address}") as session:
            async with session.get("/metrics") as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
            async with session.get("/readyz") as response:
                assert response.status == 500, "in practice any number of probes may wait"
    finally:
        await http.stop()


async def test_an_error_of_a_read_does_not_keep_the_turn() -> None:
    budget = ReadBudget()
    with pytest.raises(RuntimeError):
        async with budget.turn():
            raise RuntimeError
    async with budget.turn():
        pass
