"""Children that run and do nothing."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from waiting import until

from quire.addresses import with_port
from quire.restarts import RestartPolicy
from quire.supervisor import ChildSpec, Supervisor
from quire.watch import health_probe, replace_when_hung

IDLE = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")


class Watched:
    """A supervised child, and what the watch is told of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_serving = False
        self.num_checks = 0
        self.supervisor = Supervisor(
            [ChildSpec("executor", IDLE)],
            log=lambda name, line: self.lines.append(line),
            policy=RestartPolicy(first_delay_s=0.01),
        )

    async def probe(self, timeout_s: float) -> bool:
        self.num_checks += 1
        return self.is_serving

    async def checked(self, num_times: int) -> None:
        target = self.num_checks + num_times
        await until(lambda: self.num_checks >= target)


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    it = Watched()

    async def ready() -> bool:
        return True

    async with it.supervisor:
        await it.supervisor.until_ready(ready)
        watch = asyncio.create_task(replace_when_hung(it.supervisor, "executor", it.probe, 0.02))
        yield it
        watch.cancel()


async def test_a_child_that_stops_serving_is_replaced() -> None:
    async with watched() as it:
        first = it.supervisor.pid("executor")
        it.is_serving = True
        await it.checked(2)
        it.is_serving = False
        await until(lambda: it.supervisor.pid("executor") not in (None, first))
        assert it.lines[:2] == [
            "executor has not served for 0.02 s: killed",
            "executor was killed by SIGKILL; restarting it in 0.01 s",
        ]


async def test_a_child_that_has_never_served_is_left_alone() -> None:
    """The one that is started in the place of another as well."""
    async with watched() as it:
        first = it.supervisor.pid("executor")
        await it.checked(10)
        assert it.supervisor.pid("executor") == first
        it.is_serving = True
        await it.checked(2)
        it.is_serving = False
        await until(lambda: it.supervisor.pid("executor") not in (None, first))
        second = it.supervisor.pid("executor")
        await it.checked(10)
        assert it.supervisor.pid("executor") == second


async def test_a_failed_check_or_three_are_forgiven() -> None:
    async with watched() as it:
        first = it.supervisor.pid("executor")
        answers = [True, False, False, False] * 5

        async def probe(timeout_s: float) -> bool:
            return answers.pop(0) if answers else True

        watch = asyncio.create_task(replace_when_hung(it.supervisor, "executor", probe, 0.02))
        await until(lambda: not answers)
        assert it.supervisor.pid("executor") == first
        assert it.lines == []
        watch.cancel()


async def test_nobody_there_is_not_serving() -> None:
    async with health_probe(with_port("127.0.0.1:0")) as is_serving:
        assert await is_serving(5.0) is False
