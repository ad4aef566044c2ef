"""Restarts of children that die, and of children for which the system has no process."""

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

import quire.cli.supervisor
from quire.cli.restarts import Backoff, RestartPolicy
from quire.cli.supervisor import ChildFailed, Supervisor
from tests.support import virtual_time
from tests.support.client.children import SLEEP, Log, child, never, yes
from tests.support.client.fake_children import FakeChild
from tests.support.waiting import WAIT_S, until


def test_delays_double_up_to_the_limit_for_ever() -> None:
    backoff = Backoff(RestartPolicy(first_delay_s=1, max_delay_s=5))
    assert [backoff.next_delay_s(10.0) for _ in range(2000)] == [1, 2, 4] + [5] * 1997


def test_a_healthy_while_resets_the_delay() -> None:
    backoff = Backoff(RestartPolicy(first_delay_s=1, max_delay_s=8, healthy_s=60))
    assert [backoff.next_delay_s(ran_s) for ran_s in (0, 59.9, 60, 3)] == [1, 2, 1, 2]
    assert backoff.num_in_a_row == 2


async def _supervised(seconds: float, policy: RestartPolicy | None = None) -> tuple[list[float], list[str]]:
    """Runs one fake child for this time; returns when it was started, and the lines of the supervisor."""
    log = Log()
    supervisor = Supervisor([child("executor", "")], log=log, policy=policy)
    async with supervisor:
        await supervisor.until_ready(yes)
        await asyncio.sleep(seconds)
    (fake,) = cast("list[FakeChild]", supervisor._children)
    return fake.started_s, log.of("supervisor")


def test_deaths_under_a_poison_request_and_many_more_never_end_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.cli.supervisor, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "lives", [(1.5, -9)] * 1000)
    started_s, lines = virtual_time.run(_supervised(2 * 3600))
    assert len(started_s) == 1001
    assert started_s[:7] == pytest.approx([0, 1.7, 3.6, 5.9, 9.0, 13.7, 20.2])
    assert lines[0] == "executor was killed by SIGKILL; restarting it in 0.2 s"
    assert lines[999] == "executor was killed by SIGKILL; restarting it in 5 s (restart 1000 in a row)"


def test_a_child_that_was_healthy_is_restarted_soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.cli.supervisor, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "lives", [(1, 1), (1, 1), (90, 1)])
    started_s, _ = virtual_time.run(_supervised(3600))
    assert started_s == pytest.approx([0, 1.2, 2.6, 92.8])


@pytest.mark.parametrize("return_code", [2, 3])
def test_after_ready_a_bad_configuration_or_address_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, return_code: int
) -> None:
    monkeypatch.setattr(quire.cli.supervisor, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "lives", [(100, return_code)] * 3)
    policy = RestartPolicy(fatal_at_start=frozenset({2, 3}))
    assert len(virtual_time.run(_supervised(3600, policy))[0]) == 4


async def _starting(probe: Callable[[], Awaitable[bool]]) -> None:
    policy = RestartPolicy(fatal_at_start=frozenset({2, 3}))
    async with Supervisor([child("executor", "")], log=Log(), policy=policy) as supervisor:
        await supervisor.until_ready(probe)


@pytest.mark.parametrize("return_code", [2, 3])
def test_at_the_first_start_a_bad_configuration_or_address_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, return_code: int
) -> None:
    monkeypatch.setattr(quire.cli.supervisor, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "lives", [(3, -9), (3, return_code)])
    with pytest.raises(ChildFailed) as failed:
        virtual_time.run(_starting(never))
    assert failed.value.exit_code == return_code


def test_other_ends_at_the_first_start_are_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quire.cli.supervisor, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "lives", [(1, 1)] * 20)

    async def after_an_hour() -> bool:
        return asyncio.get_running_loop().time() > 3600

    virtual_time.run(_starting(after_an_hour))


async def test_a_child_that_dies_after_it_was_ready_is_restarted() -> None:
    log = Log()
    policy = RestartPolicy(first_delay_s=0.01)
    async with Supervisor([child("executor", SLEEP)], log=log, policy=policy) as supervisor:
        await supervisor.until_ready(yes)
        await log.until("executor", "up")
        first = supervisor.pid("executor")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await log.until("executor", "up", count=2)
        second = supervisor.pid("executor")
        assert second not in (None, first)
    assert any("killed by SIGKILL; restarting" in line for line in log.of("supervisor"))


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The outcomes of the next attempts to start a process. Later attempts succeed."""
    outcomes: list[bool] = []
    start = asyncio.create_subprocess_exec

    async def start_or_fail(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if outcomes and not outcomes.pop(0):
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_fail)
    return outcomes


async def test_a_restart_without_a_process_is_repeated(forks: list[bool]) -> None:
    log = Log()
    policy = RestartPolicy(first_delay_s=0.01)
    async with Supervisor([child("executor", SLEEP)], log=log, policy=policy) as supervisor:
        await supervisor.until_ready(yes)
        await log.until("executor", "up")
        forks[:] = [False, False]
        os.kill(supervisor.pid("executor") or 0, signal.SIGKILL)
        await log.until("executor", "up", count=2)
    assert [line for line in log.of("supervisor") if "could not be started" in line] == [
        "executor could not be started; restarting it in 0.02 s (restart 2 in a row)",
        "executor could not be started; restarting it in 0.04 s (restart 3 in a row)",
    ]


async def test_a_child_that_cannot_be_started_at_first_is_a_failure(forks: list[bool]) -> None:
    forks[:] = [True, False]
    async with Supervisor([child("scheduler", SLEEP), child("executor", SLEEP)], log=Log()) as supervisor:
        with pytest.raises(ChildFailed, match=r"executor could not be started before it was ready: .*no more"):
            await supervisor.until_ready(never)


async def test_stopping_ends_the_wait_for_a_restart() -> None:
    log = Log()
    policy = RestartPolicy(first_delay_s=3600, max_delay_s=3600)
    supervisor = Supervisor([child("executor", SLEEP)], log=log, policy=policy)
    await supervisor.start()
    await supervisor.until_ready(yes)
    await log.until("executor", "up")
    pid = supervisor.pid("executor")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: len(log.of("supervisor")) > 0)
    async with asyncio.timeout(WAIT_S):
        assert await supervisor.stop() == []
    assert log.of("executor") == ["up"]
