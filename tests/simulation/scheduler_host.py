"""The machine of the scheduler: runs one process after another, each with engine, intake and server."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from scheduler.config import SchedulerConfig
from scheduler.engine.engine import Engine, ServerState
from scheduler.engine.options import EngineOptions, from_fields
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.servers.access import Access
from scheduler.servers.generation_server import GenerationServer
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.text import chat, workers
from scheduler.text.chat import ChatRenderer
from tests.simulation import requests
from tests.simulation.clients import LOST
from tests.simulation.processes import SimulatedProcess
from tests.simulation.shared_call import Credentials, SharedCall
from tests.support.scheduler.small_tokenizers import CHAT_TEMPLATE

if TYPE_CHECKING:
    from scheduler.core import Scheduler, StepPlan
    from tests.simulation.clients import Call
    from tests.simulation.quire_serve import ChildProcess
    from tests.simulation.world import World


class SchedulerProcess(SimulatedProcess):
    """One scheduler process: everything that the scheduler's main function would make."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__()
        self.world, self.number = world, number
        self.calls: dict[Call, None] = {}
        self.is_ending = False
        self._shared_call: SharedCall | None = None
        self.wire = world.new_wire("primary")
        self.context.run(self._make)

    def _make(self) -> None:
        world = self.world
        prefix_caching, in_flight, describe_timeout_s = world.options
        options = replace(
            from_fields(EngineOptions, SchedulerConfig(model="unused", step_timeout_s=world.step_timeout_s)),
            enable_prefix_caching=prefix_caching,
            max_in_flight=in_flight,
            describe_timeout_s=describe_timeout_s,
        )
        self.engine = Engine(world.new_client(self.wire, "primary"), options, self._planned)
        self.engine.on_state_change(self._state_changed)
        self.metrics = SchedulerMetrics(clock=asyncio.get_running_loop().time)
        self.metrics.engine = self.engine
        tokenizer = requests.tokenizer()
        renderer = ChatRenderer(CHAT_TEMPLATE, tokenizer.special_tokens, tokens=tokenizer.control_tokens)
        model = ServedModel(tokenizer, renderer, GenerationDefaults(eos_token_ids=(requests.eos_token_id(),)))
        self.intake = Intake(self.engine, model, self.metrics)
        self.server = GenerationServer(
            self.engine, self.intake, "fcfs", world.stalled_reader_timeout_s, Access(Credentials())
        )
        self.running = asyncio.create_task(self.engine.run(), name="engine")

    def shared_call(self) -> SharedCall:
        """Returns the call of GenerateMany to this process. Called in its tasks."""
        if self._shared_call is None or self._shared_call.has_ended:
            self._shared_call = SharedCall(self.world, self)
        return self._shared_call

    @property
    def awaits_messages(self) -> bool:
        """True while messages of the shared call are on their way to this process."""
        return self._shared_call is not None and self._shared_call.has_unsent

    def die(self) -> None:
        """Cuts the process off at once, as SIGKILL does, and ends its tasks."""
        notices_s = self.world.notices_s()
        self.wire.is_cut = True
        self.wire.break_calls(0.0, notices_s)
        self.world.wires.remove(self.wire)
        for call in list(self.calls):
            call.end(*LOST)
        self.end()

    def _planned(self, core: Scheduler, plan: StepPlan, duration_s: float) -> None:
        world = self.world
        world.log(f"plan {plan.epoch}.{plan.step_id}: {plan.num_tokens} tokens of {plan.num_sequences} sequences")
        self.metrics.planned(plan, 0.0)
        world.num_steps += 1
        world.oracles.planned(self.engine, core, plan)
        world.faults.may_raise("engine: observer of plans")

    def _state_changed(self, state: ServerState) -> None:
        self.world.log(f"state: {state.value}")
        self.world.faults.may_raise("engine: observer of the state")


class SimulatedChatWorker:
    """Renders chats like the process of `scheduler.text.chat_worker`, after a while."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ask(self, frame: bytes) -> workers.Answer:
        await asyncio.sleep(self._world.random.uniform(0, 0.05))
        return workers.Answer(chat.TEXT, requests.renderer()(json.loads(frame[4:])["messages"]))


class SchedulerHost:
    """Starts a scheduler when `quire serve` asks for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.process: SchedulerProcess | None = None
        self.num_processes = 0
        self.load_s = 0.0
        self._child: ChildProcess | None = None
        self._loading: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def begin(self, child: ChildProcess) -> None:
        self._child = child
        self._loading = asyncio.get_running_loop().call_later(self.load_s, self._listen)

    def _listen(self) -> None:
        self.num_processes += 1
        process = self.process = SchedulerProcess(self._world, self.num_processes)
        process.running.add_done_callback(lambda _: self._ended(process))
        self._world.log(f"scheduler {process.number} listens")
        if self._child is not None:
            self._child.say_ready()

    def _ended(self, process: SchedulerProcess) -> None:
        """Called when the engine has ended; in a process that runs, this is a failure, and the process exits."""
        if process is self.process and self._ending is None:
            error = None if process.running.cancelled() else process.running.exception()
            self._world.oracles.engine_ended(error)
            self.lose_process(f"the scheduler exits: {error!r}", 1)

    def lose_process(self, why: str, return_code: int = -signal.SIGKILL) -> None:
        """Ends the process, also one that loads."""
        if self._child is None or self._child.returncode is not None:
            return
        self._world.log(why)
        if self._loading is not None:
            self._loading.cancel()
        process, self.process = self.process, None
        if process is not None:
            self._world.oracles.scheduler_lost(process)
            process.die()
        self._child.exit(return_code)

    def signalled(self, number: int) -> None:
        """Handles a signal. A stopped process handles SIGKILL only."""
        if number == signal.SIGKILL or (number == signal.SIGABRT and not (self.process and self.process.is_stopped)):
            self.lose_process("the scheduler is killed by its supervisor", -number)
        elif number == signal.SIGTERM and self._ending is None:
            self._ending = asyncio.create_task(self._end(), name="scheduler's end")

    async def _end(self) -> None:
        """Ends as the scheduler's main function does: the engine is cancelled, and nothing of it may be left."""
        if process := self.process:
            process.is_ending = True
            process.running.cancel()
            await asyncio.wait([process.running])
            if process.engine.state is ServerState.SERVING:
                self._world.oracles.violated("an engine that has ended says that it serves")
            await self._world.pass_time_for_messages()
        self.lose_process("the scheduler has ended", 0)


def chats_in_place(world: World) -> Any:
    """Lets the shipped renderer use simulated workers."""

    async def start(module: str, settings: dict[str, Any]) -> SimulatedChatWorker:
        return SimulatedChatWorker(world)

    return patch.object(workers._Worker, "start", start)
