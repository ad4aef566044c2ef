"""The supervisor with small Python programs as children."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from quire.cli.child import Child, ChildExit, ChildSpec
from quire.cli.restarts import RestartPolicy
from quire.cli.supervisor import ChildFailed, Supervisor
from tests.support.client.children import SLEEP, STUBBORN, Log, child, is_alive, never, yes
from tests.support.waiting import until


def test_exits_have_a_message_and_an_exit_code() -> None:
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


async def test_a_child_that_ends_before_all_are_ready_is_a_failure() -> None:
    log = Log()
    broken = child("executor", "import sys; print('cannot read weights', file=sys.stderr); sys.exit(4)")
    async with Supervisor([broken, child("scheduler", SLEEP)], log=log) as supervisor:
        other = supervisor.pid("scheduler")
        assert other is not None
        with pytest.raises(ChildFailed, match=r"executor exited with status 4 .*cannot read weights") as failed:
            await supervisor.until_ready(never)
        assert failed.value.exit_code == 4
    assert not is_alive(other)
    assert log.of("executor") == ["cannot read weights"]  # not restarted


async def test_a_failure_shows_the_reason_of_a_child_that_logs_as_json() -> None:
    program = """
        import json, sys
        print(json.dumps({"event": "cannot read weights", "level": "critical"}), file=sys.stderr)
        sys.exit(4)
    """
    async with Supervisor([child("executor", program)], log=Log()) as supervisor:
        with pytest.raises(ChildFailed, match="ready: cannot read weights"):
            await supervisor.until_ready(never)


async def test_until_ready_repeats_the_probe_until_it_succeeds() -> None:
    answers = [False, False, True]

    async def probe() -> bool:
        return answers.pop(0)

    async with Supervisor([child("x", SLEEP)], log=Log()) as supervisor:
        await supervisor.until_ready(probe, interval_s=0.001)
    assert answers == []


async def test_children_end_one_after_the_other_in_order() -> None:
    log = Log()
    graceful = """
        import os, signal, sys, time
        def end(*_):  # os.write: the signal may interrupt the print below
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


async def test_a_child_that_does_not_end_is_killed_with_its_children() -> None:
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


async def test_ending_a_child_does_not_poll_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll can take the exit status away from the thread that waits for the child (Python 3.11)."""

    def refuse(*_: object) -> None:
        raise AssertionError("the child was polled")

    monkeypatch.setattr(subprocess.Popen, "send_signal", refuse)
    sleeper = Child(child("sleeper", SLEEP), Log())
    await sleeper.start()
    waiting = asyncio.create_task(sleeper.wait())
    await until(lambda: sleeper.pid is not None)
    sleeper.terminate()
    assert (await waiting).return_code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("return_code", "told"),
    [(-9, "was killed by SIGKILL"), (-40, "was killed by signal 40"), (3, "exited with status 3")],
)
def test_the_end_of_a_child_is_told(return_code: int, told: str) -> None:
    assert str(ChildExit("executor", return_code, "")) == f"executor {told}"
