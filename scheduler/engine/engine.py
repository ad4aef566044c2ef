"""The engine: takes requests, and serves them in sessions with one executor after another.

    submit, cancel, stop ──► Scheduler (the core) ◄── Session (one epoch: plans out, results in)
    sinks of requests    ◄── EventDispatcher      ◄── events of the core

The engine owns the core, the sinks and the state that readiness reports. When an executor is lost, the engine
reconnects, and the core recomputes the requests that were running. Call all methods on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from scheduler.core import ExecutorLost, ExecutorNotOurs, QueueFull, Unavailable, block_map, kv_usage
from scheduler.engine.attachment import attach, fail_stranded_requests
from scheduler.engine.dispatcher import EventDispatcher, FollowUps, Sink
from scheduler.engine.failures import Failures
from scheduler.engine.loop_signal import LoopSignal
from scheduler.engine.readiness import Readiness, ServerState
from scheduler.engine.session import PlanObserver, Session, log_exceptions
from scheduler.engine.step_trace import StepTraces
from scheduler.engine.wait_prediction import WaitPrediction
from scheduler.engine.withdrawals import Withdrawals

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from scheduler.core import BlockMap, Events, KVUsage, Request, Scheduler
    from scheduler.engine.executor_client import ExecutorClient
    from scheduler.engine.model_description import ModelDescription
    from scheduler.engine.options import EngineOptions

__all__ = ["Engine", "ServerState"]

log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.05
"""Pause before the engine tries to reconnect to a lost executor; doubles after each failure."""

T = TypeVar("T")


class Engine:
    """The API of the engine. `on_plan` is called for each plan; an exception that it raises is logged."""

    def __init__(
        self,
        client: ExecutorClient,
        options: EngineOptions,
        on_plan: PlanObserver = lambda core, plan, duration_s: None,
    ) -> None:
        self._client = client
        self._options = options
        self._on_plan = log_exceptions(on_plan)
        self._signal = LoopSignal()
        self._readiness = Readiness()
        self._described = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._scheduler: Scheduler | None = None
        self._session: Session | None = None
        self._description: ModelDescription | None = None
        self._dispatcher = EventDispatcher()
        self._waits = WaitPrediction()
        self._request_ids = count(1)
        self.traces = StepTraces()
        self.failures = Failures()
        self.withdrawals = Withdrawals()

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ServerState:
        """The source of all readiness reports. SERVING means that an executor is attached and makes progress."""
        return self._readiness.state

    @property
    def is_ready(self) -> bool:
        return self.state is ServerState.SERVING

    @property
    def readiness(self) -> str:
        """The state in words, with the reason if an operator has to act."""
        return str(self._readiness)

    def on_state_change(self, callback: Callable[[ServerState], None]) -> None:
        self._readiness.on_change(callback)

    @property
    def description(self) -> ModelDescription:
        """The model that is served. Raises Unavailable before the first executor has described itself."""
        if self._description is None:
            raise Unavailable("no executor has described itself yet")
        return self._description

    async def described(self) -> ModelDescription:
        await self._described.wait()
        return self.description

    @property
    def max_prompt_and_output(self) -> int:
        """Most tokens that one sequence can hold, given max_model_len and the pool."""
        return self._core.max_tokens_per_sequence

    @property
    def core(self) -> Scheduler | None:
        """The core, for reading counters; None before the first executor."""
        return self._scheduler

    def block_map(self, *, summary_only: bool = False) -> BlockMap:
        return block_map(self._core, summary_only=summary_only)

    def kv_usage(self) -> KVUsage:
        return kv_usage(self._core)

    @property
    def oldest_waiting_s(self) -> float:
        """Seconds that the oldest waiting sequence has waited; 0 if none waits."""
        return 0.0 if self._scheduler is None else self._waits.oldest_s(self._scheduler, time.monotonic())

    # --- requests ---------------------------------------------------------------------------------------------

    def new_request_id(self) -> int:
        return next(self._request_ids)

    def check_deadline(self, tenant: str, deadline_s: float | None, max_tokens: float, priority: int) -> None:
        """Raises QueueFull if a new request would miss its deadline."""
        if self._scheduler is not None:
            self._waits.check(self._scheduler, tenant, deadline_s, max_tokens, time.monotonic(), priority)

    def submit(self, request: Request, sink: Sink) -> None:
        """Admits a request to the queue. Raises Unavailable, CapacityExceeded or QueueFull."""
        self._readiness.check_open()
        now_s = time.monotonic()
        try:
            with self._signal.report_bugs():
                self._core.add(request, now_s)
        except QueueFull as error:
            raise type(error)(str(error), self._dispatcher.retry_after_s) from error
        if self._session is not None:
            self._session.add_arrival(now_s)
        self._dispatcher.add(request.request_id, sink)
        self._idle.clear()
        self._signal.set()

    def cancel(self, request_id: int) -> None:
        """Ends a request in any state; its sink receives no more events. An unknown id is no error."""
        if self._dispatcher.forget(request_id):
            self._requests_ended()
            with self._signal.defer_errors():
                self._core.cancel(request_id)

    def stop(self, request_id: int, index: int) -> None:
        """Ends one sequence because its text is complete, and reports the end to its sink.

        A sink may call this from its `tokens` method: the sequence then ends after the dispatch.
        """
        if request_id in self._dispatcher and not self._dispatcher.defer_stop(request_id, index):
            with self._signal.defer_errors():
                self._tell(self._core.stop(request_id, index))

    def reset_prefix_cache(self) -> int:
        num_blocks = self._core.reset_prefix_cache()
        self._signal.set()  # the next plan tells the executor, see `withdrawals`
        return num_blocks

    async def drain(self, *, is_final: bool = False) -> None:
        """Refuses new requests; returns when all admitted ones have ended. `is_final`: `resume` cannot undo it."""
        self._readiness.drain(is_final=is_final)
        await self._idle.wait()

    def resume(self) -> None:
        """Accepts requests again after `drain`. Raises Unavailable if the process is about to end."""
        self._readiness.resume()

    # --- sessions ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until cancelled. An unexpected error fails all requests; raises it if such errors do not end."""
        try:
            await self.failures.outlast(self._serve_executors, self._begin_anew, self.traces.last_committed)
        finally:
            self._readiness.update(is_attached=False)

    async def _serve_executors(self) -> None:
        """Serves in one session after the other. When an executor is lost, reconnects and resumes the requests."""
        pause_s = 0.0
        while True:
            try:
                await self._expire_during(asyncio.sleep(pause_s))
                pause_s = min(max(2 * pause_s, MIN_BACKOFF_S), self._options.max_backoff_s)
                self._session = await self._attach()
                pause_s = MIN_BACKOFF_S
                try:
                    await self._session.serve()
                finally:
                    await self._session.close()
            except ExecutorNotOurs as error:
                pause_s = self._options.max_backoff_s
                if str(error) != self._readiness.trouble:
                    log.error("%s", error)
                self._detach(str(error))
            except ExecutorLost as error:
                if self._scheduler is not None and self._scheduler.is_attached:
                    log.warning("executor lost: %s", error)
                else:
                    log.info("%s", error)
                self._detach()

    async def _attach(self) -> Session:
        """Begins an epoch with an executor. Raises ExecutorLost, ExecutorNotOurs."""
        options, known = self._options, self._description
        epoch = self._scheduler.state.epoch + 1 if self._scheduler else 1
        new = await self._expire_during(attach(self._client, options, known, epoch, self._signal.set))
        if known and fail_stranded_requests(self._core, self._dispatcher, known, new.model):
            self._requests_ended()
        self._description = new.model
        core = self._scheduler = self._scheduler or options.new_core(new.model)
        events = core.executor_attached(epoch, new.num_blocks, new.stream.retained)
        self._described.set()
        log.info("executor attached: %s, epoch %d, lease %d", new.model, epoch, new.stream.lease)
        self._tell(events)
        self._readiness.update(is_attached=True)
        return Session(core, self._client, new.stream, options, self._signal, self.traces, self._tell, self._on_plan)

    def _detach(self, trouble: str = "") -> None:
        self._session = None
        self.traces.drop_in_flight()
        if self._scheduler is not None:
            with self._signal.defer_errors():
                self._tell(self._scheduler.executor_lost(time.monotonic()))
        self._readiness.update(is_attached=False, trouble=trouble)

    async def _begin_anew(self, pause_s: float) -> None:
        """Replaces the core, whose state may be wrong (I11), fails all requests, and waits for `pause_s`."""
        self._signal.forget_error()
        self._scheduler = None
        self._dispatcher.fail_all()
        self._requests_ended()
        if self._description is not None:
            self._scheduler = self._options.new_core(self._description)
            self._scheduler.reset_prefix_cache()  # what the old core has published may be wrong, too
        self._detach()
        await self._expire_during(asyncio.sleep(pause_s))

    async def _expire_during(self, awaited: Coroutine[None, None, T]) -> T:
        """Returns the result of `awaited`. Meanwhile expires requests, because no executor is attached."""
        task = asyncio.create_task(awaited)
        task.add_done_callback(lambda _: self._signal.set())
        try:
            while True:
                self._signal.clear()
                if task.done():
                    return task.result()
                next_deadline_s = None
                if self._scheduler is not None:
                    self._tell(self._scheduler.expire(time.monotonic()))
                    next_deadline_s = self._scheduler.state.deadlines.next_s
                await self._signal.wait_until(next_deadline_s)
        finally:
            task.cancel()

    # --- telling the clients ----------------------------------------------------------------------------------

    def _tell(self, events: Events) -> None:
        if self._scheduler is not None:
            self._waits.committed(self._scheduler, events, time.monotonic())
        self._carry_out(self._dispatcher.dispatch(events))
        self.withdrawals.check(self._scheduler)

    def _carry_out(self, follow_ups: FollowUps) -> None:
        """Carries out what a dispatch has collected. Stops come before ends, because they can end requests."""
        for request_id in follow_ups.broken:
            with self._signal.defer_errors():
                self._core.cancel(request_id)
        for request_id, index in follow_ups.stops:
            self.stop(request_id, index)
        num_before = len(self._dispatcher)
        for request_id, (sequence, reason) in follow_ups.finished.items():
            if not self._core.has_request(request_id):
                self._dispatcher.forget_ended(sequence, reason)
        if follow_ups.broken or len(self._dispatcher) < num_before:
            self._requests_ended()

    def _requests_ended(self) -> None:
        """Called after requests have ended: wakes the loop, and drain() if it was the last request."""
        if not self._dispatcher:
            self._idle.set()
        self._signal.set()

    @property
    def _core(self) -> Scheduler:
        if self._scheduler is None:
            raise Unavailable("no executor has described itself yet")
        return self._scheduler
