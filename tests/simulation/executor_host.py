"""The machine of the executor: runs one executor process after another, each with the real servicer and device thread.

The two threads of a process are tasks that take one piece of work after the other from the real queues' stand-ins and
pass it to the real handlers. The model is a fake that computes a hash (`tests.support.core.fake_executor`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from executor.device import device_thread, results_thread
from executor.device.device_thread import DeviceThread
from executor.device.results_thread import ResultsThread, Unfinished
from executor.device.work import Step
from executor.errors import PlanRejected
from executor.plans import plan_wire
from executor.plans.limits import PlanLimits
from executor.plans.plan import Publication, Reports, StepOutput, StepPlan, StepTimings
from executor.server import Server
from executor.stream.servicer import ExecutorServicer
from scheduler.core import FinishReason
from tests.simulation.translation import core_plan, publication, reported
from tests.support.core.fake_executor import FakeExecutor, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World

_REASONS = {None: 0, FinishReason.EOS: 1, FinishReason.LENGTH: 2, FinishReason.STOP: 3, FinishReason.NOT_FINITE: 4}


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

    async def _set_health(self, is_serving: bool) -> None:
        pass


class SimulatedRunner:
    """Computes a plan with the fake executor of the core's tests, which checks the plan and the KV that it reads."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._executor = self._empty_executor()
        self._digest_scheme = ""

    def is_sane(self) -> bool:
        self._world.faults.may_raise("executor: is sane")
        return True

    def reset(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication:
        self._world.faults.may_raise("executor: reset")
        keeps = is_trusted and digest_scheme == self._digest_scheme != ""
        self._executor = self._executor.next_epoch(0) if keeps else self._empty_executor()
        self._executor.retains = bool(digest_scheme)
        self._digest_scheme = digest_scheme
        return publication(self._executor.digests)

    def _empty_executor(self) -> FakeExecutor:
        machine = self._world.machine
        sizes = machine.block_size, machine.max_num_seqs, machine.max_num_batched_tokens, machine.vocab_size
        return FakeExecutor(self._process.num_blocks, *sizes, epoch=0)

    def execute(self, plan: StepPlan, computing: Callable[[], None]) -> StepOutput | Launched:
        self._world.faults.may_raise("executor: execute")
        machine = self._world.machine
        if not self._executor.epoch:
            self._executor.epoch, self._executor.step_id = plan.epoch, plan.step_id - 1
        computing()
        try:
            result = self._executor.execute(core_plan(plan, self._process.digest))
        except PlanError as error:
            self._world.oracles.plan_refused(self._process, plan.epoch, str(error))
            raise PlanRejected(str(error)) from None
        if self._world.faults.poisons(
            slot.token_ids[slot.num_prompt_tokens - 1] for slot in self._executor.slots.values()
        ):
            raise RuntimeError("the step of this sequence fails")
        reasons = list(result.end_reasons or [None] * len(result.token_ids))
        for place, index in enumerate(sorted(self._executor.sampled_slots)):
            slot = self._executor.slots[index]
            if self._world.faults.spoils(slot.token_ids[slot.num_prompt_tokens - 1], len(slot.token_ids)):
                reasons[place], slot.has_ended = FinishReason.NOT_FINITE, True
        output = StepOutput(
            plan.epoch,
            plan.step_id,
            np.array(result.token_ids, np.int32),
            np.array([_REASONS[reason] for reason in reasons], np.uint8),
            StepTimings(1_000, int(machine.step_s * 1e9), 1_000),
            Reports(reported(result.logprobs), None, reported(result.candidates)),
        )
        return Launched(self._world, output) if machine.launches else output


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on a device that computes while the thread goes on."""

    world: World
    output: StepOutput

    def finish(self) -> StepOutput:
        self.world.faults.may_raise("executor: finish")
        return self.output


class Host:
    """Starts the next process when one has ended, after a pause."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.process: Process | None = None
        self.num_processes = 0
        self.next_num_blocks: int | None = None
        self.next_digest: str | None = None
        self.restart_s = 0.2
        self.is_stopped = False

    def start(self) -> None:
        world = self._world
        if self.is_stopped:
            return
        self.num_processes += 1
        num_blocks = self.next_num_blocks or world.num_blocks
        self.process = Process(world, self.num_processes, num_blocks, self.next_digest or "0")
        world.oracles.executor_started(self.process)
        self.process.start_watching()

    def lose_process(self, why: str) -> None:
        """Ends the process, and with it all its connections."""
        if (process := self.process) is None:
            return
        self._world.log(why)
        self.process = None
        process.end()
        for wire in self._world.wires:
            wire.break_calls(self._world.notices_s())
        asyncio.get_running_loop().call_later(self.restart_s, self.start)
