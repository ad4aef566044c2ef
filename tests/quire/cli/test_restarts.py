"""Restarts of children that die, and of children for which the system has no process."""

import asyncio
import errno
import os
import signal
from typing import Any

import pytest

from quire.cli.restarts import RestartBudget, RestartPolicy
from quire.cli.supervisor import ChildFailed, Supervisor
from tests.support.client.children import SLEEP, Log, child, never, yes
from tests.support.waiting import WAIT_S, until


def test_delays_double_up_to_the_limit_until_a_crash_loop() -> None:
    budget = RestartBudget(RestartPolicy(first_delay_s=1, max_delay_s=5, max_restarts=4, window_s=100))
    assert [budget.next_delay_s(10.0) for _ in range(5)] == [1, 2, 4, 5, None]


def test_old_restarts_are_forgotten() -> None:
    budget = RestartBudget(RestartPolicy(first_delay_s=1, max_delay_s=8, max_restarts=2, window_s=10))
    assert [budget.next_delay_s(time_s) for time_s in (0.0, 5.0, 9.9)] == [1, 2, None]
    assert budget.next_delay_s(10.0) == 2  # only the restart at 5 still counts
    assert budget.next_delay_s(14.0) is None
    assert budget.next_delay_s(30.0) == 1


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


async def test_a_crash_loop_is_a_failure_with_the_last_line_of_the_child() -> None:
    log = Log()
    policy = RestartPolicy(first_delay_s=0.001, max_restarts=2)
    crash = child("executor", "import time; time.sleep(0.2); print('boom', flush=True); raise SystemExit(7)")
    async with Supervisor([crash], log=log, policy=policy) as supervisor:
        await supervisor.until_ready(yes)
        async with asyncio.timeout(WAIT_S):
            failure = await supervisor.failure()
    assert failure.exit_code == 7
    assert "again and again: boom" in str(failure)
    assert log.of("executor") == ["boom"] * 3


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
        "executor could not be started; restarting it in 0.02 s",
        "executor could not be started; restarting it in 0.04 s",
    ]


async def test_a_child_that_can_never_be_restarted_is_a_failure(forks: list[bool]) -> None:
    log = Log()
    policy = RestartPolicy(first_delay_s=0.001, max_restarts=2)
    supervisor = Supervisor([child("executor", SLEEP), child("other", SLEEP)], log=log, policy=policy)
    await supervisor.start()
    await supervisor.until_ready(yes)
    await log.until("other", "up")
    forks[:] = [False] * 9
    os.kill(supervisor.pid("executor") or 0, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        failure = await supervisor.failure()
    assert str(failure) == f"executor could not be started, again and again: [Errno {errno.EAGAIN}] no more processes"
    assert failure.exit_code == 1
    assert [ended.name for ended in await supervisor.stop()] == ["other"]


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
