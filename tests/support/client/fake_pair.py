"""Runs `quire serve` with stand-ins for the two services."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from quire.cli.child import ChildSpec
from quire.cli.serve import serve
from quire.cli.services import ServicePair, on_free_ports, service_pair

IDLE = (sys.executable, "-c", "import time; time.sleep(600)")


class FakePair:
    """A ServicePair with other processes as its children."""

    def __init__(self, *children: tuple[str, ...], **values: Any) -> None:
        self._pair = service_pair(on_free_ports({"model": str(Path(__file__).parent), **values}))
        names = ("scheduler", "executor")
        self._specs = [ChildSpec(name, command) for name, command in zip(names, children, strict=True)]

    gateway = None
    suffix = ""

    @property
    def replicas(self) -> Any:
        return (self,)

    @property
    def scheduler(self) -> Any:
        return self._pair.scheduler

    @property
    def executor(self) -> Any:
        return self._pair.executor

    @property
    def admin_address(self) -> str:
        return self._pair.admin_address

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
