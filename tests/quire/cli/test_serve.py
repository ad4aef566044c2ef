"""`serve` with other programs instead of the services."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.block_map import ServerState
from quire.cli.child import ChildSpec
from quire.cli.serve import serve, serving_probe
from quire.cli.services import ServicePair, on_free_ports, service_pair
from quire.cli.supervisor import ChildFailed
from tests.support.client.waiting import until

IDLE = (sys.executable, "-c", "import time; time.sleep(600)")


class FakePair:
    """A ServicePair with other processes as its children."""

    def __init__(self, *children: tuple[str, ...], **values: Any) -> None:
        self._pair = service_pair(on_free_ports({"model": str(Path(__file__).parent), **values}))
        names = ("scheduler", "executor")
        self._specs = [ChildSpec(name, command) for name, command in zip(names, children, strict=True)]

    @property
    def scheduler(self) -> Any:
        return self._pair.scheduler

    @property
    def executor(self) -> Any:
        return self._pair.executor

    def children(self) -> list[ChildSpec]:
        return [
            ChildSpec(spec.name, tuple(word.replace("ADDRESS", self.scheduler.listen) for word in spec.command))
            for spec in self._specs
        ]

    def ready_line(self) -> str:
        return self._pair.ready_line()


SERVING = (sys.executable, "-m", "tests.support.client.serving_child", "ADDRESS")


class Run:
    """A task that runs `serve`, and its output."""

    def __init__(self, *children: tuple[str, ...]) -> None:
        pair: Any = FakePair(*children)
        self.pair: ServicePair = pair
        self.said: list[str] = []
        self.logged: list[str] = []

        def log(name: str, line: str) -> None:
            self.logged.append(f"{name}: {line}")

        self.task = asyncio.create_task(serve(self.pair, self.said.append, log))


async def test_ready_is_printed_once_and_a_signal_ends_with_status_0() -> None:
    run = Run(SERVING, IDLE)
    await until(lambda: run.said != [] or run.task.done())
    assert run.said == [run.pair.ready_line()]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.task == 0
    assert run.said == [run.pair.ready_line()]
    assert "scheduler: serving" in run.logged
    assert "supervisor: scheduler exited with status 0" in run.logged


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


async def test_the_probe_fails_until_the_server_has_an_executor() -> None:
    class Client:
        state = ServerState.WAITING_FOR_EXECUTOR

        async def server_info(self, *, timeout_s: float) -> Any:
            return self

    client: Any = Client()
    assert await serving_probe(client)() is False
    client.state = ServerState.SERVING
    assert await serving_probe(client)() is True
