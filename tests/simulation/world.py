"""One simulated world: everything that a seed decides, from the first request to the last check."""

from __future__ import annotations

import asyncio
import logging
import random as random_module
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import grpc

from executor import server as executor_server
from scheduler.config import SchedulerConfig
from scheduler.engine.engine import Engine, ServerState
from scheduler.engine.executor_client import ExecutorClient
from scheduler.engine.options import EngineOptions, from_fields
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.servers.generation_server import GenerationServer
from scheduler.telemetry.metrics import SchedulerMetrics
from tests.simulation import clients
from tests.simulation.events import draw_events
from tests.simulation.executor_host import Host, Machine
from tests.simulation.faults import Faults
from tests.simulation.oracles import Oracles
from tests.simulation.transport import Wire
from tests.support.virtual_time import SimulatedLoop, Stuck, TooManyTurns, clocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire.executor.v1 import executor_pb2 as pb
    from scheduler.core import Scheduler, StepPlan

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
            vocab_size=clients.tokenizer()._tokenizer.get_vocab_size(),
        )
        self.host = Host(self)
        self.oracles = Oracles(self)
        self.faults = Faults(self)
        self.mean_delay_s = random.choice((0.0002, 0.002, 0.02))
        self.wires: list[Wire] = []
        self.wire = self.new_wire("primary")
        self.options = random.random() < 0.8, random.choice((1, 2, 2, 3)), random.choice((1.0, 5.0))
        self.events = draw_events(self)

    # --- what the parts ask for -----------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def max_tokens_per_sequence(self) -> int:
        return min(self.machine.max_model_len, (self.num_blocks - 1) * self.machine.block_size)

    def log(self, text: str) -> None:
        self.lines.append(f"{self.now_s:.6f} {text}")

    def step_s(self) -> float:
        return self.random.expovariate(1 / self.machine.step_s)

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
        self._begin()
        running = asyncio.create_task(self.engine.run(), name="engine")
        watching = asyncio.create_task(self._watch(), name="oracles")
        happening = [asyncio.create_task(self._happen(at_s, event), name="event") for at_s, event in self.events]
        calls = self.calls = [
            clients.Call(self, clients.draw(self.random, number, self)) for number in range(self.num_clients)
        ]
        if self.random.random() < 0.9:
            await self.engine.described()
        tasks = [asyncio.create_task(call.run(), name=call.name) for call in calls]
        _, unfinished = await asyncio.wait([*tasks, *happening], timeout=HEALED_S)
        self.faults.is_over, self.healed_s = True, self.now_s
        self.log("nothing goes wrong from now on")
        if unfinished:
            _, unfinished = await asyncio.wait(unfinished, timeout=PATIENCE_S)
        for task in sorted(task.get_name() for task in unfinished):
            self.oracles.violated(f"{task} does not end")
        if not running.done() and not unfinished:
            await self._check_serving()
            until_s = self.now_s + PATIENCE_S  # steps in flight hold blocks of requests that were cancelled
            while (core := self.engine.core) is not None and core.num_in_flight and self.now_s < until_s:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)
            self.oracles.check_idle()
        if running.done():
            self.oracles.engine_ended(None if running.cancelled() else running.exception())
        await self._stop([running, watching, *unfinished])

    def _begin(self) -> None:
        prefix_caching, in_flight, describe_timeout_s = self.options
        config = SchedulerConfig(model="unused", step_timeout_s=self.step_timeout_s)
        options = replace(
            from_fields(EngineOptions, config),
            enable_prefix_caching=prefix_caching,
            max_in_flight=in_flight,
            describe_timeout_s=describe_timeout_s,
        )
        self.client = self.new_client(self.wire, "primary")
        self.engine = Engine(self.client, options, self._planned)
        self.engine.on_state_change(self._state_changed)
        self.metrics = SchedulerMetrics(clock=asyncio.get_running_loop().time)
        self.metrics.engine = self.engine
        model = ServedModel(clients.tokenizer(), None, GenerationDefaults(eos_token_ids=(clients.eos_token_id(),)))
        self.intake = Intake(self.engine, model, self.metrics)
        self.server = GenerationServer(self.engine, self.intake, "fcfs", self.stalled_reader_timeout_s)
        self.host.start()

    def _planned(self, core: Scheduler, plan: StepPlan, duration_s: float) -> None:
        self.log(f"plan {plan.epoch}.{plan.step_id}: {plan.num_tokens} tokens of {plan.num_sequences} sequences")
        self.metrics.planned(plan, 0.0)
        self.oracles.planned(core, plan)
        self.faults.may_raise("engine: observer of plans")

    def _state_changed(self, state: ServerState) -> None:
        self.log(f"state: {state.value}")
        self.faults.may_raise("engine: observer of the state")

    async def _happen(self, at_s: float, event: Any) -> None:
        await asyncio.sleep(at_s)
        await event(self)

    async def _watch(self) -> None:
        while True:
            self.oracles.check_readiness()
            await asyncio.sleep(0.05)

    async def _check_serving(self) -> None:
        """With a healthy executor for long enough, the server says that it serves."""
        until_s = self.now_s + PATIENCE_S
        while self.engine.state is not ServerState.SERVING and self.now_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        if self.engine.state is not ServerState.SERVING:
            self.oracles.violated(f"a healthy executor, and the server is {self.engine.readiness}")

    async def _stop(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        if self.engine.state is ServerState.SERVING:
            self.oracles.violated("an engine that has ended says that it serves")
        await asyncio.sleep(2 * self.mean_delay_s + self.notice_s + 1.0)
        self.host.is_stopped = True
        if process := self.host.process:
            if process.servicer._streams:
                self.oracles.violated("the executor keeps the stream of a scheduler that has ended")
            process.end()
        await asyncio.sleep(0.1)
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
        loop = SimulatedLoop(MAX_TURNS)
        runner = stack.enter_context(asyncio.Runner(loop_factory=lambda: loop))
        world_of: list[World] = []
        stack.enter_context(clocks_of(loop, lambda: 1.7e9 + loop.time() + (world_of[0].wall_jump_s if world_of else 0)))
        ids = Random(seed)
        stack.enter_context(patch.object(uuid, "uuid4", lambda: uuid.UUID(int=ids.getrandbits(128))))
        stack.enter_context(patch.object(executor_server.faulthandler, "dump_traceback", lambda: None))
        random_module.seed(seed)

        async def live() -> None:
            world = World(seed)
            world_of.append(world)
            with _logged(world), world.faults.in_place():
                await world.live()

        try:
            runner.run(live())
        except (Stuck, TooManyTurns) as error:
            world_of[0].oracles.violations.append(f"{type(error).__name__}: {error}")
    return world_of[0]
