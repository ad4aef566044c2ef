"""The gateway asks each scheduler for its state once a second, whatever becomes of the scheduler meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.schedulers import scheduler as scheduler_module
from gateway.schedulers.shared_call import SharedCall
from quire.errors import UnavailableError
from quire.v1 import generation_pb2 as pb
from quire.v1 import replica_pb2 as replica_pb
from tests.gateway.schedulers.test_reports import ReportRig, load
from tests.support.gateway.rig import Rig
from tests.support.waiting import until


class BrokenCall:
    """A call that grpc.aio cancels, because its connection breaks while the end of the requests is sent."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __aiter__(self) -> BrokenCall:
        return self

    async def __anext__(self) -> None:
        raise asyncio.CancelledError


async def test_a_connection_that_breaks_during_a_check_is_a_lost_one() -> None:
    call = SharedCall(BrokenCall, (), lambda _: None)
    with pytest.raises(UnavailableError, match="lost"):
        await call.check(1.0)


async def test_a_check_can_be_cancelled() -> None:
    begun = asyncio.Event()

    class Silent(BrokenCall):
        async def __anext__(self) -> None:
            begun.set()
            await asyncio.Event().wait()

    checking = asyncio.create_task(SharedCall(Silent, (), lambda _: None).check(1.0))
    await begun.wait()
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking


async def test_a_scheduler_that_dies_during_a_poll_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "POLL_INTERVAL_S", 0.01)
    async with Rig() as rig:
        (scheduler,) = rig.schedulers.all
        method, num_broken = scheduler.call._method, 0

        def breaks_once(*arguments: Any, **options: Any) -> Any:
            nonlocal num_broken
            num_broken += 1
            scheduler.call._method = method
            return BrokenCall()

        scheduler.call._method = breaks_once
        await until(lambda: num_broken and not scheduler.is_ready)
        await until(lambda: scheduler.is_ready)


async def test_a_report_that_comes_during_a_check_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        scheduler, fake = rig.schedulers.all[0], rig.fakes[0]
        check, checking, go_on, has_checked = scheduler.call.check, *(asyncio.Event() for _ in range(3))

        async def slow(timeout_s: float) -> None:
            checking.set()
            await go_on.wait()
            await check(timeout_s)
            has_checked.set()

        monkeypatch.setattr(scheduler.call, "check", slow)
        await checking.wait()
        fake.state = pb.SERVER_STATE_DRAINING
        rig.report(fake, replica_pb.WatchResponse(load=load(state=fake.state)))
        await until(lambda: not scheduler.is_ready)
        states: list[bool] = []
        monkeypatch.setattr(scheduler, "_on_ready", lambda: states.append(scheduler.is_ready))
        go_on.set()
        await has_checked.wait()
        has_checked.clear()
        await has_checked.wait()  # of the next poll: the first one has ended
        assert not states
