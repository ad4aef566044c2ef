"""The engine loop: drives the core with an executor, and tells the clients' sinks what happened.

    wake up → commit a result that is in → send the plans that are due → tell the clients → sleep

Plans come first: the clients are told while the plan is on its way, so that the executor never waits for them.
One event wakes it: a result, a new or cancelled request, a deadline, a plan that was held back (pace.py), a batch that
is waited for no longer, a stream that ended. What is in flight is the core's knowledge; the loop keeps none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from scheduler.core import (
    BlockMap,
    Events,
    ExecutorLost,
    ExecutorNotOurs,
    InvariantViolation,
    KVUsage,
    QueueFull,
    Request,
    Scheduler,
    Unavailable,
    block_map,
    check_invariants,
    kv_usage,
)
from scheduler.core.inspect.step_load import LoadTracker
from scheduler.engine.dispatcher import Audience
from scheduler.engine.options import EngineOptions
from scheduler.engine.plan_observer import harmless
from scheduler.engine.plan_timing import Pace
from scheduler.engine.step_trace import StepTrace, StepTraces
from scheduler.engine.watchdog import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from scheduler.core import StepPlan
    from scheduler.engine.dispatcher import Sink
    from scheduler.engine.executor_client import Arrival, ExecutorClient, PlanStream
    from scheduler.engine.model_description import ModelDescription
    from scheduler.engine.plan_observer import PlanObserver

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 10.0
"""An idle engine checks the core's invariants at most this often."""

MIN_BACKOFF_S = 0.05
"""Before an executor that was lost is looked for again; twice as long after each failure."""

T = TypeVar("T")


class ServerState(Enum):
    WAITING_FOR_EXECUTOR = "waiting for executor"
    SERVING = "serving"
    DRAINING = "draining"


class Engine:
    """Owns the core and the executor's stream. All methods belong to the event loop's thread.

    on_plan  told of each plan, with the core that made it and the seconds that this took
    """

    def __init__(
        self,
        client: ExecutorClient,
        options: EngineOptions | None = None,
        on_plan: PlanObserver = lambda core, plan, duration_s: None,
    ) -> None:
        self._client = client
        self._on_plan = harmless(on_plan)
        self._options = options or EngineOptions()
        self._wake = asyncio.Event()
        self._described = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._scheduler: Scheduler | None = None
        self._description: ModelDescription | None = None
        self.traces = StepTraces()
        self._loads, self._pace = LoadTracker(), Pace()  # of this epoch's plans
        self._audience = Audience(
            give_up=self.cancel, is_open=lambda number: self._core.has_request(number), ended=self._ended
        )
        self._num_requests = 0
        self._state_callbacks: list[Callable[[ServerState], None]] = []
        self._state = ServerState.WAITING_FOR_EXECUTOR
        self._trouble = ""  # why there is no executor, where somebody has to act
        self._bug: InvariantViolation | None = None  # found outside the loop, which has yet to hear of it
        self._progress = self._watched()
        self._checked_at_s = 0.0
        self._held_until_s: float | None = None  # the plan that was asked for last

    # --- what the front door asks -----------------------------------------------------------------------------

    @property
    def state(self) -> ServerState:
        """SERVING: an executor is there, and gets on. Every word on readiness comes from here."""
        return self._state

    @property
    def is_ready(self) -> bool:
        return self._state is ServerState.SERVING

    @property
    def readiness(self) -> str:
        """The state in words, and the reason where somebody has to act."""
        return f"{self._state.value}: {self._trouble}" if self._trouble else self._state.value

    @property
    def description(self) -> ModelDescription:
        """Known once an executor has been described."""
        if self._description is None:
            raise Unavailable("no executor has described itself yet")
        return self._description

    async def described(self) -> ModelDescription:
        await self._described.wait()
        return self.description

    @property
    def max_prompt_and_output(self) -> int:
        """Tokens that one sequence can hold: what max_model_len and the pool leave."""
        return self._core.max_tokens_per_sequence

    def new_request_id(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def submit(self, request: Request, sink: Sink) -> None:
        """Admits a request to the queue. Raises Unavailable, CapacityExceeded or QueueFull."""
        if self._is_draining:
            raise Unavailable("the server is draining")
        try:
            self._core.add(request, time.monotonic())
        except QueueFull as error:
            raise QueueFull(str(error), retry_after_s=min(30.0, max(0.1, self._audience.finish_interval_s))) from error
        self._pace.arrivals.add(time.monotonic())
        self._audience.join(request.request_id, sink)
        self._idle.clear()
        self._wake.set()

    def cancel(self, request_id: int) -> None:
        """Ends a request in any state; its sink hears nothing more. An unknown id is no error."""
        if self._audience.leave(request_id):
            with self._leaving_bugs_to_the_loop():
                self._core.cancel(request_id)

    def stop(self, request_id: int, index: int) -> None:
        """Ends one sequence because its text is complete; its sink gets `finished` at once."""
        if request_id in self._audience:
            with self._leaving_bugs_to_the_loop():
                self._audience.tell_finished(self._core.stop(request_id, index))

    def block_map(self, *, summary_only: bool = False) -> BlockMap:
        return block_map(self._core, summary_only=summary_only)

    def kv_usage(self) -> KVUsage:
        return kv_usage(self._core)

    @property
    def core(self) -> Scheduler | None:
        """For reading counters. None before the first executor."""
        return self._scheduler

    @property
    def oldest_waiting_s(self) -> float:
        """How long the one in the queue that has been there longest has been; 0 for an empty queue."""
        now_s, waiting = time.monotonic(), () if self._scheduler is None else self._scheduler.state.waiting
        return now_s - min((sequence.queued_s for sequence in waiting), default=now_s)

    def reset_prefix_cache(self) -> int:
        return self._core.reset_prefix_cache()

    async def drain(self) -> None:
        """Refuses new requests; returns when all admitted ones have ended."""
        self._is_draining = True
        self._update_state()
        await self._idle.wait()

    def on_state_change(self, callback: Callable[[ServerState], None]) -> None:
        self._state_callbacks.append(callback)

    # --- the loop ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until cancelled: an executor that is lost is looked for again, and what ran is computed again."""
        pause_s = 0.0
        while True:
            try:
                await self._meanwhile(asyncio.sleep(pause_s))
                pause_s = min(max(2 * pause_s, MIN_BACKOFF_S), self._options.max_backoff_s)
                stream = await self._attach()
                pause_s = MIN_BACKOFF_S
                try:
                    await self._serve(stream)
                finally:
                    self._progress.close()
                    await stream.close()
            except ExecutorNotOurs as error:
                pause_s = self._options.max_backoff_s
                if str(error) != self._trouble:
                    log.error("%s", error)
                self._detach(str(error))
            except ExecutorLost as error:
                if self._is_attached:
                    log.warning("executor lost: %s", error)
                else:
                    log.info("%s", error)
                self._detach()
            except InvariantViolation as error:
                log.critical("the core's books do not balance: %s; all requests fail, and it begins anew", error)
                self._begin_anew()
                self._detach()

    async def _attach(self) -> PlanStream:
        description = await self._meanwhile(self._client.describe(self._options.describe_timeout_s))
        wanted = self._options.narrowed(description)
        if self._description is not None and (differences := self._description.differences(wanted)):
            changes = ", and ".join(differences)
            raise ExecutorNotOurs(f"the executor now has {changes}: restart the scheduler to take it")
        self._description = wanted
        if self._scheduler is None:
            self._scheduler = self._options.new_core(wanted)
        core = self._scheduler
        events = core.executor_attached(max(core.state.epoch, description.epoch) + 1, description.num_blocks)
        self._described.set()
        log.info("executor attached: %s, epoch %d", self._description, core.state.epoch)
        self._loads, self._pace = LoadTracker(), Pace()
        stream = self._client.open_stream(self._wake.set)
        self._progress = self._watched()
        self._audience.tell(events)
        self._trouble = ""
        self._update_state()
        return stream

    def _detach(self, trouble: str = "") -> None:
        self._trouble = trouble
        self.traces.lost()
        if self._scheduler is not None:
            with self._leaving_bugs_to_the_loop():
                self._audience.tell(self._scheduler.executor_lost(time.monotonic()))
        self._update_state()

    def _begin_anew(self) -> None:
        """After a bug of ours. What the core still holds to be true may not be, and what came of its last step may have
        reached it and no client: no request goes on with either (I11)."""
        self._bug = None
        self._scheduler = self._options.new_core(self.description)
        self._audience.fail_all()

    @contextmanager
    def _leaving_bugs_to_the_loop(self) -> Iterator[None]:
        """A bug of ours that shows here is no business of the caller's: the loop has to know, at once."""
        try:
            yield
        except InvariantViolation as error:
            self._bug = error
            self._wake.set()

    def _raise_bug(self) -> None:
        """To be called after every wait, before the core is asked for anything."""
        if self._bug is not None:
            raise self._bug

    async def _serve(self, stream: PlanStream) -> None:
        while True:
            self._wake.clear()
            self._raise_bug()
            self._audience.tell(self._core.expire(time.monotonic()))
            arrival = stream.take()
            if arrival is None:
                await self._send_plans(stream)
                if not self._wake.is_set():
                    await self._sleep()
            else:
                # A task's turn comes when this one waits: when the first plan is under way, or there is none.
                telling = asyncio.create_task(self._tell_meanwhile(self._commit(arrival)))
                try:
                    await self._send_plans(stream)
                finally:
                    await telling

    def _commit(self, arrival: Arrival) -> Events:
        events = self._core.commit(arrival.result)
        self._pace.learn(self.traces.committed(arrival.received_ns, time.monotonic_ns(), arrival.timings))
        self._progress.moved()
        return events

    async def _send_plans(self, stream: PlanStream) -> None:
        core = self._core
        while (plan := self._schedule()) is not None:
            if core.num_in_flight == 1:
                self._progress.moved()
            trace = StepTrace.planned(plan, self._loads.follow(plan))
            self.traces.planned(trace)
            try:
                async with asyncio.timeout(self._options.step_timeout_s):
                    await stream.send(plan)
            except TimeoutError:
                raise ExecutorLost(f"took no plan for {self._options.step_timeout_s:g} s") from None
            trace.sent_ns = time.monotonic_ns()

    def _schedule(self) -> StepPlan | None:
        self._raise_bug()
        self._held_until_s = self._pace.held_until_s(self._core, self.traces)
        if self._held_until_s is not None:
            return None
        started_s = time.perf_counter()
        plan = self._core.schedule()
        if plan is not None:
            self._on_plan(self._core, plan, time.perf_counter() - started_s)
        return plan

    async def _sleep(self) -> None:
        """Until something happens, or is due."""
        core, now_s = self._core, time.monotonic()
        self._progress.check(core.num_in_flight)
        reasons = (core.next_wake_s, self._progress.due_s(core.num_in_flight), self._held_until_s)
        due_s = [at_s for at_s in reasons if at_s is not None]
        if (
            not core.num_in_flight
            and not core.num_unfinished_requests
            and now_s - self._checked_at_s > CHECK_INTERVAL_S
        ):
            check_invariants(core)
            self._checked_at_s = now_s
        await self._wait_for_wake(min(due_s) - now_s if due_s else None)

    async def _meanwhile(self, awaited: Coroutine[None, None, T]) -> T:
        """What it comes to. Between two executors nothing can run, but deadlines still pass."""
        task = asyncio.create_task(awaited)
        task.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._wake.clear()
                self._raise_bug()
                if task.done():
                    return task.result()
                due_s = None
                if self._scheduler is not None:
                    self._audience.tell(self._scheduler.expire(time.monotonic()))
                    due_s = self._scheduler.state.deadlines.next_s
                await self._wait_for_wake(None if due_s is None else due_s - time.monotonic())
        finally:
            task.cancel()

    async def _wait_for_wake(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            await self._wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._wake.set)
        await self._wake.wait()
        timer.cancel()

    # --- telling the clients ----------------------------------------------------------------------------------

    async def _tell_meanwhile(self, events: Events) -> None:
        self._audience.tell(events)

    def _ended(self) -> None:
        """A request has: wakes who waits for the last one."""
        if not self._audience:
            self._idle.set()
        self._wake.set()

    # --- small things -----------------------------------------------------------------------------------------

    @property
    def _core(self) -> Scheduler:
        if self._scheduler is None:
            raise Unavailable("no executor has described itself yet")
        return self._scheduler

    @property
    def _is_attached(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_attached

    def _update_state(self) -> None:
        attached = ServerState.SERVING if self._is_attached else ServerState.WAITING_FOR_EXECUTOR
        state = ServerState.DRAINING if self._is_draining else attached
        if state is not self._state:
            self._state = state
            for callback in self._state_callbacks:
                callback(state)

    def _watched(self) -> Progress:
        timeout_s = self._options.step_timeout_s
        return Progress(lambda: self._client.describe(timeout_s), self._wake.set, timeout_s)
