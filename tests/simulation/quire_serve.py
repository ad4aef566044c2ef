"""`quire serve` in virtual time: the shipped supervisor, restart policy and watch over simulated processes."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

from quire.cli import child, serve
from quire.cli.child import ChildSpec
from quire.cli.supervisor import Supervisor
from quire.cli.watch import replace_when_hung

if TYPE_CHECKING:
    from tests.simulation.world import World

LOAD_TIMEOUT_S = 60.0
GRACE_S = 40.0


class ChildProcess:
    """A child process, in place of the result of asyncio.create_subprocess_exec."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader()
        self._ended = asyncio.Event()

    def say_ready(self) -> None:
        if self.returncode is None:
            self.stdout.feed_data(b"ready\n")

    def exit(self, return_code: int) -> None:
        if self.returncode is None:
            self.returncode = return_code
            self.stdout.feed_eof()
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode or 0


class Service(Protocol):
    """The program in a child process."""

    def begin(self, child: ChildProcess) -> None: ...

    def signalled(self, number: int) -> None: ...


class QuireServe:
    """Starts the services, and starts each again when it ends or hangs, as `quire serve` does."""

    def __init__(self, world: World, services: dict[str, Service]) -> None:
        self._world, self._services = world, services
        self._children: dict[int, tuple[ChildProcess, Service]] = {}
        specs = [ChildSpec(name, (name,), GRACE_S) for name in services]
        self._supervisor = Supervisor(specs, log=self._log, policy=serve._POLICY)
        self._watching: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self._supervisor.start()
        silent_s = min(serve._SCHEDULER_SILENT_S, self._world.step_timeout_s)
        watch = replace_when_hung(self._supervisor, "scheduler", self._is_alive, silent_s, LOAD_TIMEOUT_S)
        for name, work in (("watch", watch), ("first start", self._supervisor.until_ready(self._is_serving))):
            self._watching.append(asyncio.create_task(work, name=f"supervisor's {name}"))

    async def stop(self) -> None:
        """Ends the services in order, as after SIGTERM."""
        for task in self._watching:
            task.cancel()
        await asyncio.wait(self._watching)
        await self._supervisor.stop()

    def in_place(self) -> ExitStack:
        """Lets the shipped `Child` start and signal simulated processes."""
        patches = ExitStack()
        system = SimpleNamespace(environ={}, getpid=lambda: 1, kill=self._signal, killpg=self._signal)
        patches.enter_context(patch.object(asyncio, "create_subprocess_exec", self._create))
        patches.enter_context(patch.object(child, "os", system))
        return patches

    async def _create(self, *command: str, **options: Any) -> ChildProcess:
        process = ChildProcess(100 + len(self._children))
        service = self._services[command[-1]]
        self._children[process.pid] = process, service
        service.begin(process)
        return process

    def _signal(self, pid: int, number: int) -> None:
        process, service = self._children[pid]
        if process.returncode is None:
            self._world.log(f"process {pid} gets {signal.Signals(number).name}")
            service.signalled(number)

    async def _is_alive(self, timeout_s: float) -> bool:
        """Asks the scheduler as GET /healthz does: its event loop has to run."""
        if (process := self._world.scheduler) is None:
            return False
        answered = asyncio.Event()
        asyncio.get_running_loop().call_soon(answered.set, context=process.context)
        try:
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        except TimeoutError:
            return False
        return True

    async def _is_serving(self) -> bool:
        return not self._world.has_no_core

    def _log(self, name: str, line: str) -> None:
        self._world.log(f"{name}: {line}")
