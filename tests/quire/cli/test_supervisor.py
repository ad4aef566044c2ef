"""The supervisor with small Python programs as children."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from quire.cli.child import ChildExit, ChildSpec
from quire.cli.restarts import RestartBudget, RestartPolicy
from quire.cli.supervisor import ChildFailed, Supervisor
from tests.support.client.waiting import WAIT_S, until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


class Log:
    """Collects what the supervisor passes on."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for child, line in self.lines if child == name]

    async def until(self, name: str, line: str, count: int = 1) -> None:
        await until(lambda: self.of(name).count(line) >= count)


def child(name: str, program: str, grace_s: float = 30.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", textwrap.dedent(program)), grace_s)


async def yes() -> bool:
    return True


async def never() -> bool:
    return False


def is_alive(pid: int) -> bool:
    """A zombie is dead: only its entry is left, until somebody asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_delays_double_up_to_the_limit_and_then_it_is_a_crash_loop() -> None:
    budget = RestartBudget(RestartPolicy(first_delay_s=1, max_delay_s=5, max_restarts=4, window_s=100))
    assert [budget.next_delay_s(10.0) for _ in range(5)] == [1, 2, 4, 5, None]


def test_old_restarts_are_forgotten() -> None:
    budget = RestartBudget(RestartPolicy(first_delay_s=1, max_delay_s=8, max_restarts=2, window_s=10))
    assert [budget.next_delay_s(time_s) for time_s in (0.0, 5.0, 9.9)] == [1, 2, None]
    assert budget.next_delay_s(10.0) == 2  # only the one at 5 counts still
    assert budget.next_delay_s(14.0) is None
    assert budget.next_delay_s(30.0) == 1


def test_how_a_child_ended() -> None:
    assert str(ChildExit("executor", 3, "")) == "executor exited with status 3"
    assert str(ChildExit("executor", -9, "")) == "executor was killed by SIGKILL"
    assert [ChildExit("x", code, "").exit_code for code in (3, 0, -9)] == [3, 1, 137]


async def test_output_is_passed_on_line_by_line_with_the_childs_name() -> None:
    log = Log()
    program = r"""
        import sys, time
        sys.stdout.write("one\ntw"); sys.stdout.flush()
        sys.stderr.write("error\n"); sys.stderr.flush()
        sys.stdout.write("10%\r50%\r100%\n\n"); sys.stdout.flush()
        sys.stdout.buffer.write(b"\xff bytes\n"); sys.stdout.flush()
        time.sleep(600)
    """
    async with Supervisor([child("talker", program)], log=log):
        await log.until("talker", "\ufffd bytes")
    assert log.of("talker") == ["one", "twerror", "10%", "50%", "100%", "\ufffd bytes"]


async def test_a_child_that_ends_before_the_whole_is_ready_is_a_failure() -> None:
    log = Log()
    broken = child("executor", "import sys; print('cannot read weights', file=sys.stderr); sys.exit(4)")
    async with Supervisor([broken, child("scheduler", SLEEP)], log=log) as supervisor:
        other = supervisor.pid("scheduler")
        assert other is not None
        with pytest.raises(ChildFailed, match=r"executor exited with status 4 .*cannot read weights") as failed:
            await supervisor.until_ready(never)
        assert failed.value.exit_code == 4
    assert not is_alive(other)
    assert log.of("executor") == ["cannot read weights"]  # it was not started again


async def test_until_ready_asks_until_the_answer_is_yes() -> None:
    answers = [False, False, True]

    async def probe() -> bool:
        return answers.pop(0)

    async with Supervisor([child("x", SLEEP)], log=Log()) as supervisor:
        await supervisor.until_ready(probe, interval_s=0.001)
    assert answers == []


async def test_a_child_that_dies_later_is_restarted() -> None:
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


async def test_a_crash_loop_is_a_failure_with_the_childs_last_words() -> None:
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
    """Whether the next tries to start a process succeed; those after them do."""
    outcomes: list[bool] = []
    start = asyncio.create_subprocess_exec

    async def start_or_fail(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if outcomes and not outcomes.pop(0):
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_fail)
    return outcomes


async def test_a_restart_for_which_there_is_no_process_is_tried_again(forks: list[bool]) -> None:
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


async def test_a_child_for_which_there_never_is_a_process_is_a_failure(forks: list[bool]) -> None:
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


async def test_no_process_at_the_start_is_a_failure(forks: list[bool]) -> None:
    forks[:] = [True, False]
    async with Supervisor([child("scheduler", SLEEP), child("executor", SLEEP)], log=Log()) as supervisor:
        with pytest.raises(ChildFailed, match=r"executor could not be started before it was ready: .*no more"):
            await supervisor.until_ready(never)


async def test_children_end_one_after_the_other_in_order() -> None:
    log = Log()
    graceful = """
        import os, signal, sys, time
        def end(*_):  # os.write: the signal may come in the middle of the print below
            os.write(1, b"ending\\n"); time.sleep(0.1); os.write(1, b"ended\\n"); sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(600)
    """
    supervisor = Supervisor([child("scheduler", graceful), child("executor", graceful)], log=log)
    await supervisor.start()
    await supervisor.until_ready(yes)
    await log.until("scheduler", "up")
    await log.until("executor", "up")
    assert await supervisor.stop() == [ChildExit("scheduler", 0, "ended"), ChildExit("executor", 0, "ended")]
    endings = [(name, line) for name, line in log.lines if line in ("ending", "ended")]
    assert endings == [
        ("scheduler", "ending"),
        ("scheduler", "ended"),
        ("executor", "ending"),
        ("executor", "ended"),
    ]
    assert supervisor.pid("scheduler") is None
    assert await supervisor.stop() == []


async def test_the_last_child_is_kept_alive_while_the_first_one_drains() -> None:
    log = Log()
    draining = """
        import os, signal, sys, time
        def end(*_):
            os.write(1, b"draining\\n"); time.sleep(600)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(600)
    """
    specs = [child("scheduler", draining), child("executor", SLEEP)]
    async with Supervisor(specs, log=log, policy=RestartPolicy(first_delay_s=0.01)) as supervisor:
        await supervisor.until_ready(yes)
        await log.until("scheduler", "up")
        await log.until("executor", "up")
        stopping = asyncio.create_task(supervisor.stop())
        await log.until("scheduler", "draining")
        executor = supervisor.pid("executor")
        assert executor is not None
        os.kill(executor, signal.SIGKILL)
        await log.until("executor", "up", count=2)
        supervisor.kill()
        await stopping


async def test_a_child_that_does_not_end_is_killed_with_all_it_started() -> None:
    log = Log()
    parent = f"""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
        grandchild.stdout.readline()
        print(grandchild.pid, flush=True)
        time.sleep(600)
    """
    supervisor = Supervisor([child("stubborn", parent, grace_s=0.05)], log=log)
    await supervisor.start()
    await until(lambda: len(log.of("stubborn")) > 0)
    grandchild = int(log.of("stubborn")[0])
    assert is_alive(grandchild)
    assert [(ended.return_code, ended.ended_well) for ended in await supervisor.stop()] == [(-9, False)]
    await until(lambda: not is_alive(grandchild))


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


async def test_an_error_inside_the_context_kills_at_once() -> None:
    log = Log()
    pids = []

    async def fail() -> None:
        async with Supervisor([child("stubborn", STUBBORN, grace_s=600)], log=log) as supervisor:
            await log.until("stubborn", "up")
            pids.append(supervisor.pid("stubborn"))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await fail()
    assert not is_alive(pids[0] or 0)


async def test_a_command_that_does_not_exist_is_a_failure() -> None:
    async with Supervisor([ChildSpec("x", ("/nowhere/to/be/found",))], log=Log()) as supervisor:
        with pytest.raises(ChildFailed, match="cannot run /nowhere") as failed:
            await supervisor.until_ready(never)
    assert failed.value.exit_code == 127


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_no_child_outlives_a_supervisor_that_is_killed() -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        from quire.cli.child import ChildSpec
        from quire.cli.supervisor import Supervisor

        async def main():
            spec = ChildSpec("child", (sys.executable, "-c", {STUBBORN!r}))
            up = asyncio.Event()
            async with Supervisor([spec], log=lambda name, line: up.set()) as supervisor:
                await up.wait()
                print(supervisor.pid("child"), flush=True)
                await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:  # noqa: ASYNC220
        assert supervisor.stdout is not None
        orphan = int(supervisor.stdout.readline())
        assert is_alive(orphan)
        supervisor.kill()
    await until(lambda: not is_alive(orphan))
