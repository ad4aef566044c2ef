"""The machine of the executor: runs one executor process after another, each with the real servicer and device thread.

The two threads of a process are tasks that take one piece of work after the other from the real queues' stand-ins and
pass it to the real handlers. `runner.py` has the model.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from executor.device import device_thread, results_thread
from executor.device.device_thread import DeviceThread
from executor.device.results_thread import ResultsThread, Unfinished
from executor.device.work import Step
from executor.plans import plan_wire
from executor.plans.limits import PlanLimits
from executor.server import Server
from executor.stream.servicer import ExecutorServicer
from tests.simulation.runner import SimulatedRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor.plans.plan import StepOutput
    from tests.simulation.quire_serve import ChildProcess
    from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Machine:
    """The settings that stay the same when the process is replaced."""

    step_s: float
    launches: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int


class Queue:
    """The interface of queue.SimpleQueue, for one task that waits in `filled`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._filled.set()

    def empty(self) -> bool:
        return not self._items

    async def take(self) -> Any:
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return self._items.popleft()


class Process:
    """One executor process: an incarnation with its own leases, slots, pool and threads."""

    def __init__(self, world: World, number: int, num_blocks: int, digest: str) -> None:
        self.world, self.number, self.num_blocks, self.digest = world, number, num_blocks, digest
        self.tasks: list[asyncio.Task[Any]] = []
        self.hung_until_s = 0.0
        self.is_alive = True
        self.runner = SimulatedRunner(self)
        machine = world.machine
        limits = PlanLimits(
            vocab_size=machine.vocab_size,
            max_model_len=machine.max_model_len,
            block_size=machine.block_size,
            num_blocks=num_blocks,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
        )
        description = plan_wire.description_to_message(
            limits, incarnation=f"{number}", model_name="hash", weights_digest=digest, dtype="float32", device="none"
        )
        with (
            patch.object(device_thread, "threading", SimpleNamespace(Thread=self._thread, Lock=threading.Lock)),
            patch.object(device_thread, "queue", SimpleNamespace(SimpleQueue=Queue)),
            patch.object(results_thread, "threading", SimpleNamespace(Thread=self._thread)),
            patch.object(results_thread, "queue", SimpleNamespace(SimpleQueue=Queue)),
        ):
            self.server = SimulatedServer(self)
        self.servicer = ExecutorServicer(self.server.device, limits, description, self._observe)

    def start_watching(self) -> None:
        """Ends the process when the real server's `wait` does: if the device is lost or hangs."""

        async def watch() -> None:
            await self.server.wait()
            self.world.host.lose_process(f"executor {self.number} exits: its device is lost or hangs")

        self.tasks.append(asyncio.create_task(watch(), name="executor's watch"))

    def end(self) -> None:
        self.is_alive = False
        for task in self.tasks:
            task.cancel()

    def _observe(self, output: StepOutput) -> None:
        self.world.faults.may_raise("executor: observe")

    def _thread(self, target: Any, name: str, daemon: bool) -> SimpleNamespace:
        loops: dict[type, Callable[[Any], Any]] = {DeviceThread: self._compute, ResultsThread: self._finish}
        owner = target.__self__

        task: asyncio.Task[Any] = asyncio.create_task(loops[type(owner)](owner), name=f"executor's {name} thread")
        self.tasks.append(task)
        return SimpleNamespace(start=lambda: None, is_alive=lambda: not task.done(), join=lambda: None)

    async def _compute(self, device: DeviceThread) -> None:
        queue: Any = device._work
        while True:
            if queue.empty():
                device._deliver_pending()
            work = await queue.take()
            await self._sleep_while_hung()
            if isinstance(work, Step):
                device._deliver_pending()
                if not self.world.machine.launches:
                    await asyncio.sleep(self.world.step_s())
                    await self._sleep_while_hung()
            if not device._handle(work):
                return

    async def _finish(self, results: ResultsThread) -> None:
        queue: Any = results._work
        while (work := await queue.take()) is not None:
            await self._sleep_while_hung()
            if isinstance(work, Unfinished):
                await asyncio.sleep(self.world.step_s())
            results._handle(work)

    async def _sleep_while_hung(self) -> None:
        while (rest_s := self.hung_until_s - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(rest_s)


class SimulatedServer(Server):
    """The real watch over the device, without gRPC's server."""

    def __init__(self, process: Process) -> None:
        self._config = SimpleNamespace(step_timeout_s=process.world.step_timeout_s)  # type: ignore[assignment]
        self._ended = asyncio.Event()
        self._device_lost = False
        self.device = self._device = DeviceThread(
            process.runner,
            prepare=lambda: None,
            device_is_sane=process.runner.is_sane,
            device_lost=self._lose_device,
        )

    def _set_health(self, is_serving: bool) -> None:
        pass


class Host:
    """Starts an executor when `quire serve` asks for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.process: Process | None = None
        self.num_processes = 0
        self.next_num_blocks: int | None = None
        self.next_digest: str | None = None
        self.load_s = 0.0
        self._child: ChildProcess | None = None
        self._loading: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def begin(self, child: ChildProcess) -> None:
        self._child = child
        self._loading = asyncio.get_running_loop().call_later(self.load_s, self._listen)

    def _listen(self) -> None:
        self.num_processes += 1
        num_blocks = self.next_num_blocks or self._world.num_blocks
        self.process = Process(self._world, self.num_processes, num_blocks, self.next_digest or "0")
        self._world.oracles.executor_started(self.process)
        self.process.start_watching()
        if self._child is not None:
            self._child.say_ready()

    def lose_process(self, why: str, return_code: int = -signal.SIGKILL) -> None:
        """Ends the process, also one that loads, and with it all its connections."""
        if self._child is None or self._child.returncode is not None:
            return
        self._world.log(why)
        if self._loading is not None:
            self._loading.cancel()
        process, self.process = self.process, None
        if process is not None:
            process.end()
            for wire in self._world.wires:
                wire.break_calls(self._world.notices_s())
        self._child.exit(return_code)

    def signalled(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._ending = asyncio.create_task(self._end(), name="executor's end")
        else:
            self.lose_process("the executor is killed by its supervisor", -number)

    async def _end(self) -> None:
        if self.process is not None and self.process.servicer._streams:
            self._world.oracles.violated("the executor keeps the stream of a scheduler that has ended")
        self.lose_process("the executor has ended", 0)
