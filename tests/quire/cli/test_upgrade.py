"""An upgrade replaces the children one after the other."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.cli.restarts import RestartPolicy
from quire.cli.supervisor import Supervisor
from quire.cli.upgrade import Upgrade
from tests.support.client.children import SLEEP, Log, child, yes
from tests.support.client.fake_pair import IDLE, SERVING, Run
from tests.support.waiting import until

DRAINING = """
    import os, signal, sys, time
    num_signals = 0
    def end(*_):
        global num_signals
        num_signals += 1
        os.write(1, b"draining\\n" if num_signals == 1 else b"breaking off\\n")
        if num_signals > 1:
            os._exit(1)
    signal.signal(signal.SIGTERM, end)
    print("up", flush=True)
    while True:
        time.sleep(600)
"""


@asynccontextmanager
async def upgrading(log: Log, first: str, second: str, is_serving: Callable[[], bool]) -> AsyncIterator[Upgrade]:
    """Runs two children with an upgrade, in which the first one serves when `is_serving` says so."""

    async def first_serves(timeout_s: float) -> bool:
        return is_serving()

    async def second_serves(timeout_s: float) -> bool:
        return True

    children = [child("scheduler", second, 600), child("executor", first)]
    async with Supervisor(children, log=log, policy=RestartPolicy(first_delay_s=0.01)) as supervisor:
        await supervisor.until_ready(yes)
        await log.until("executor", "up")
        await log.until("scheduler", "up")
        upgrade = Upgrade(supervisor)
        running = asyncio.create_task(upgrade.run([{"executor": first_serves}, {"scheduler": second_serves}]))
        yield upgrade
        running.cancel()
        supervisor.kill()


async def test_the_second_child_is_replaced_when_the_first_one_serves_again() -> None:
    log, serves = Log(), asyncio.Event()
    async with upgrading(log, SLEEP, SLEEP, serves.is_set) as upgrade:
        upgrade.ask()
        await log.until("executor", "up", count=2)
        assert log.of("scheduler") == ["up"]
        serves.set()
        await log.until("scheduler", "up", count=2)
    assert [line.partition(";")[0] for line in log.of("supervisor")[:2]] == [
        "executor was killed by SIGTERM",
        "scheduler was killed by SIGTERM",
    ]


async def test_a_second_request_breaks_off_what_drains() -> None:
    log = Log()
    async with upgrading(log, SLEEP, DRAINING, lambda: True) as upgrade:
        upgrade.ask()
        await log.until("scheduler", "draining")
        upgrade.ask()
        await log.until("scheduler", "up", count=2)
    assert log.of("scheduler")[:4] == ["up", "draining", "breaking off", "up"]


async def test_stopping_during_an_upgrade_lets_the_streams_end() -> None:
    """The child has the signal of the upgrade already, and a second one would break its streams off."""
    log = Log()
    async with upgrading(log, SLEEP, DRAINING, lambda: True) as upgrade:
        upgrade.ask()
        await log.until("scheduler", "draining")
        stopping = asyncio.create_task(upgrade._supervisor.stop())
        done, _ = await asyncio.wait({stopping}, timeout=0.1)
        assert not done
        assert log.of("scheduler") == ["up", "draining"]
        upgrade.ask()
        await stopping
    assert log.of("scheduler").count("up") == 1


async def test_a_signal_replaces_the_executor_first() -> None:
    run = Run(SERVING, IDLE)
    await until(lambda: run.said != [] or run.task.done())
    os.kill(os.getpid(), signal.SIGUSR2)
    await until(lambda: any("executor was killed by SIGTERM; restarting" in line for line in run.logged))
    assert not any("scheduler exited" in line for line in run.logged), "the new executor does not serve yet"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.task == 0
