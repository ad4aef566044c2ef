"""One simulated world: everything that a seed decides, from the first request to the last check."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import random as random_module
import uuid
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc

from scheduler.engine.engine import ServerState
from scheduler.engine.executor_client import ExecutorClient
from tests.simulation.clients import Client
from tests.simulation.events import draw_events
from tests.simulation.executor_host import Host, Machine
from tests.simulation.faults import Faults
from tests.simulation.model import rank_tokens
from tests.simulation.oracles import Oracles
from tests.simulation.processes import ProcessLoop, SimulatedProcess
from tests.simulation.quire_serve import QuireServe
from tests.simulation.requests import draw, tokenizer
from tests.simulation.scheduler_host import SchedulerHost, SchedulerProcess, chats_in_place
from tests.simulation.transport import Wire
from tests.support.core import fake_executor
from tests.support.virtual_time import Stuck, TooManyTurns, clocks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire.executor.v1 import executor_pb2 as pb

MAX_TURNS = 300_000
HEALED_S = 4.0
"""Time after which nothing new goes wrong."""
PATIENCE_S = 120.0
"""Time from then on within which every request must end."""


class World:
    """The parts of one world. `run` returns the violations; `lines` is the log of what happened."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.lines: list[str] = []
        self.wall_jump_s = 0.0
        self.healed_s = float("inf")
        self.shares_calls = Random(f"door {seed}").random() < 0.5  # of its own, so that the other draws stay
        self._deferrals = Random(f"deferrals {seed}")  # of its own, too
        self._deferral_share = self._deferrals.choice((0.0, 0.0, 0.1))
        self.num_clients = random.randint(1, 7)
        self.step_timeout_s = random.choice((1.0, 2.0))
        self.stalled_reader_timeout_s = random.choice((1.0, 20.0))
        self.notice_s = random.choice((0.0, 0.01, 5.0))
        self.num_blocks = random.choice((14, 25, 60))
        self.machine = Machine(
            step_s=random.choice((0.001, 0.01, 0.03)),
            launches=random.random() < 0.3,
            max_num_seqs=random.choice((2, 4, 8)),
            max_num_batched_tokens=random.choice((8, 32, 64)),
            max_model_len=48,
            block_size=random.choice((2, 4)),
            vocab_size=tokenizer()._tokenizer.get_vocab_size(),
        )
        self.host, self.schedulers = Host(self), SchedulerHost(self)
        self.serve = QuireServe(self, {"scheduler": self.schedulers, "executor": self.host})
        self.oracles = Oracles(self)
        self.faults = Faults(self)
        self.mean_delay_s = random.choice((0.0002, 0.002, 0.02))
        self.wires: list[Wire] = []
        self.num_steps = self.num_resumptions = 0
        self.lived_s = 0.0
        self.options = random.random() < 0.8, random.choice((1, 2, 2, 3)), random.choice((1.0, 5.0))
        self.events = draw_events(self)

    # --- what the parts ask for -----------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def scheduler(self) -> SchedulerProcess | None:
        """The process that listens for clients."""
        return self.schedulers.process

    @property
    def has_no_core(self) -> bool:
        return self.scheduler is None or self.scheduler.engine.core is None

    @property
    def max_tokens_per_sequence(self) -> int:
        return min(self.machine.max_model_len, (self.num_blocks - 1) * self.machine.block_size)

    def log(self, text: str) -> None:
        self.lines.append(f"{self.now_s:.6f} {text}")

    def step_s(self) -> float:
        return self.random.expovariate(1 / self.machine.step_s)

    def num_to_defer(self) -> int:
        """Returns for how many sequences and beams of a step the executor does not wait."""
        return self._deferrals.randint(1, 4) if self._deferrals.random() < self._deferral_share else 0

    def notices_s(self) -> float:
        """Returns how long an end of a broken connection takes to notice it."""
        return self.random.uniform(0, self.notice_s)

    def new_wire(self, owner: str) -> Wire:
        def server() -> Any:
            return None if self.host.process is None else self.host.process.servicer

        def encoded(response: pb.RunResponse) -> bytes:
            process = self.host.process
            if response.HasField("lease") and process is not None:
                self.log(f"{owner} gets lease {response.lease.epoch} of executor {process.number}")
                if owner == "primary":
                    self.oracles.cache.adopted(process, response.lease)
                    self.oracles.leases.setdefault(process.number, set()).add(response.lease.epoch)
            return self.faults.encode(response)

        wire = Wire(self.random, self.mean_delay_s, server)
        wire.on_response = encoded
        self.wires.append(wire)
        return wire

    def new_client(self, wire: Wire, holder: str, *, takes_over: bool = False) -> ExecutorClient:
        with patch.object(grpc.aio, "insecure_channel", lambda address, options: wire):
            return ExecutorClient("executor", holder=holder, takes_over=takes_over)

    def streams_of_executor(self) -> set[Any]:
        return set() if self.host.process is None else self.host.process.servicer._streams

    # --- one run --------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        with ExitStack() as patches:
            patches.enter_context(self.serve.in_place())
            patches.enter_context(chats_in_place(self))
            patches.enter_context(patch.object(fake_executor, "rank_tokens", rank_tokens))
            patches.enter_context(self.faults.in_place())
            await self._live()

    async def _live(self) -> None:
        asked = [draw(self.random, number, self) for number in range(self.num_clients)]
        self.clients = [Client(self, each) for each in asked]
        await self.serve.start()
        watching = asyncio.create_task(self._watch(), name="oracles")
        outside = SimulatedProcess()
        outside.is_alive = False  # no error is drawn for what happens outside
        happening = [
            asyncio.create_task(self._happen(at_s, event), name="event", context=outside.context.copy())
            for at_s, event in self.events
        ]
        if self.random.random() < 0.9:
            await self._until(lambda: not self.has_no_core, HEALED_S)
        tasks = [asyncio.create_task(client.run(), name=client.name) for client in self.clients]
        _, unfinished = await asyncio.wait([*tasks, *happening], timeout=HEALED_S)
        if events := [task for task in happening if not task.done()]:
            await asyncio.wait(events, timeout=PATIENCE_S)
        self.faults.is_over, self.healed_s = True, self.now_s
        self.log("nothing goes wrong from now on")
        if unfinished:
            _, unfinished = await asyncio.wait(unfinished, timeout=PATIENCE_S)
        for task in sorted(task.get_name() for task in unfinished):
            self.oracles.violated(f"{task} does not end")
        if not unfinished:
            await self._check_serving()
        await self._stop([watching, *unfinished])

    async def _happen(self, at_s: float, event: Any) -> None:
        await asyncio.sleep(at_s)
        try:
            await event(self)
        except Exception as error:  # noqa: BLE001  # a fault of the simulation, which must not go unnoticed
            self.oracles.violated(f"{event.__name__} fails: {error!r}")

    async def _watch(self) -> None:
        while True:
            self.oracles.check_readiness()
            await asyncio.sleep(0.05)

    async def _check_serving(self) -> None:
        """With healthy services for long enough, the server says that it serves, and nothing is left of requests."""

        def serves() -> bool:
            return self.scheduler is not None and self.scheduler.engine.state is ServerState.SERVING

        if not await self._until(serves, PATIENCE_S) or self.scheduler is None:
            self.oracles.violated("there is no scheduler, or it does not serve, although nothing goes wrong")
            return
        await asyncio.sleep(self.notice_s)  # connections of clients that broke
        process = self.scheduler
        await self._until(lambda: not process.awaits_messages, PATIENCE_S)  # of clients that have left
        core = process.engine.core  # steps in flight hold blocks of requests that were cancelled
        await self._until(lambda: core is None or not core.num_in_flight, PATIENCE_S)
        await asyncio.sleep(0.1)
        self.oracles.check_idle(process)

    async def _until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        until_s = self.now_s + patience_s
        while not condition() and self.now_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return condition()

    async def pass_time_for_messages(self) -> None:
        await asyncio.sleep(2 * self.mean_delay_s + self.notice_s + 1.0)

    async def _stop(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        await self.serve.stop()
        await asyncio.sleep(self.notice_s + 0.1)
        self.lived_s = self.now_s - 1000.0  # the loop's first reading
        self.oracles.check_tasks()


class _Lines(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._world.log(f"{record.levelname} {record.getMessage()}{'' if error is None else f': {error!r}'}")


@contextmanager
def _logged(world: World) -> Iterator[None]:
    """Collects what the scheduler and the executor log."""
    handler, names = _Lines(world), ("scheduler", "executor", "asyncio")
    before = [(logger := logging.getLogger(name), logger.level, logger.propagate) for name in names]
    for logger, _, _ in before:
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def simulate(seed: int) -> World:
    """Runs the world of a seed. Its violations are in `oracles.violations`."""
    with ExitStack() as stack:
        loop = ProcessLoop(MAX_TURNS)
        runner = stack.enter_context(asyncio.Runner(loop_factory=lambda: loop))
        world_of: list[World] = []
        stack.enter_context(clocks_of(loop, lambda: 1.7e9 + loop.time() + (world_of[0].wall_jump_s if world_of else 0)))
        ids = Random(seed)
        stack.enter_context(patch.object(uuid, "uuid4", lambda: uuid.UUID(int=ids.getrandbits(128))))
        stack.enter_context(patch.object(faulthandler, "dump_traceback", lambda: None))
        random_module.seed(seed)

        async def live() -> None:
            world = World(seed)
            world_of.append(world)
            with _logged(world):
                await world.live()

        try:
            runner.run(live())
        except (Stuck, TooManyTurns) as error:
            world_of[0].oracles.violations.append(f"{type(error).__name__}: {error}")
            loop.allow(MAX_TURNS)  # in which the tasks are cancelled
    return world_of[0]
