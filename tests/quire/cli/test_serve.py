"""`serve` with other programs instead of the services."""

import os
import signal
import sys

import pytest

from quire.cli.supervisor import ChildFailed
from tests.support.client.fake_pair import IDLE, SERVING, Run
from tests.support.waiting import until


async def test_ready_is_printed_once_and_a_signal_ends_with_status_0() -> None:
    run = Run(SERVING, IDLE)
    await until(lambda: run.said != [] or run.task.done())
    assert run.said == [run.pair.ready_line()]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.task == 0
    assert run.said == [run.pair.ready_line()]
    assert "scheduler: serving" in run.logged
    assert "supervisor: scheduler exited with status 0" in run.logged


async def test_a_terminal_that_closes_drains() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    run = Run(SERVING, IDLE)
    await until(lambda: run.said != [] or run.task.done())
    os.kill(os.getpid(), signal.SIGHUP)
    assert await run.task == 0
    signal.signal(signal.SIGHUP, before)
    assert "supervisor: draining; a second signal kills all services" in run.logged


async def test_a_scheduler_that_fails_decides_the_exit_code() -> None:
    program = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1));"
        "print('up', flush=True); time.sleep(600)"
    )
    run = Run((sys.executable, "-c", program), IDLE)
    await until(lambda: "scheduler: up" in run.logged)
    os.kill(os.getpid(), signal.SIGINT)
    assert await run.task == 1
    assert run.said == []


async def test_a_child_that_cannot_start_ends_the_command() -> None:
    broken = (sys.executable, "-c", "import sys; print('broken checkpoint'); sys.exit(2)")
    run = Run(SERVING, broken)
    with pytest.raises(
        ChildFailed, match="executor exited with status 2 before it was ready: broken checkpoint"
    ) as error:
        await run.task
    assert error.value.exit_code == 2
    assert run.said == []
