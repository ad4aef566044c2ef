"""A session drives one executor for one epoch.

    wake up → commit a result that has arrived → send the plans that are due → tell the clients → sleep

Plans are sent first and the clients are told afterwards, so that the executor never waits for clients. One signal wakes
the session for all events: a result, a new or cancelled request, a deadline, a delayed plan that is due
(plan_timing.py), a batch that has waited long enough, or the end of the stream. Only the core records what is in
flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.unexpected import unexpected
from scheduler.core import ExecutorLost, Scheduler, StepPlan, check_invariants
from scheduler.core.inspect.step_load import LoadTracker
from scheduler.engine.plan_timing import PlanTiming
from scheduler.engine.step_costs import CostEstimate
from scheduler.engine.step_trace import StepTrace
from scheduler.engine.watchdog import ExecutorWatchdog

if TYPE_CHECKING:
    from scheduler.core import Events
    from scheduler.engine.executor_client import Arrival, ExecutorClient, PlanStream
    from scheduler.engine.loop_signal import LoopSignal
    from scheduler.engine.options import EngineOptions
    from scheduler.engine.step_trace import StepTraces

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 10.0
"""Shortest time between two invariant checks of an idle session."""

PlanObserver = Callable[[Scheduler, StepPlan, float], None]
"""Called for each plan with the core that made it, the plan, and the seconds that planning took."""


class Session:
    """Drives the core and one executor over one plan stream, until either fails.

    traces   records the steps
    tell     tells the clients about events, and may then stop or cancel requests in the core
    on_plan  must not raise an exception (see `log_exceptions`)
    """

    def __init__(
        self,
        core: Scheduler,
        client: ExecutorClient,
        stream: PlanStream,
        options: EngineOptions,
        signal: LoopSignal,
        traces: StepTraces,
        tell: Callable[[Events], None],
        on_plan: PlanObserver,
    ) -> None:
        self._core = core
        self._signal = signal
        self._traces = traces
        self._tell = tell
        self._on_plan = on_plan
        self._step_timeout_s = timeout_s = options.step_timeout_s
        self._stream = stream
        self._watchdog = ExecutorWatchdog(lambda: client.describe(timeout_s), signal.set, timeout_s)
        self._loads = LoadTracker()
        self._estimate = CostEstimate()
        self._timing = PlanTiming(self._estimate)
        self._delayed_until_s: float | None = None  # None: the next plan is not delayed
        self._checked_at_s = 0.0

    def add_arrival(self, now_s: float) -> None:
        """Records the arrival of a request."""
        self._timing.arrivals.add(now_s)

    async def serve(self) -> None:
        """Serves until the session ends with ExecutorLost, or with InvariantViolation after a bug in the core."""
        while True:
            self._signal.clear()
            self._tell(self._core.expire(time.monotonic()))
            arrival = self._stream.take()
            if arrival is None:
                await self._send_plans()
                await self._sleep()
            else:
                await self._send_plans_and_tell(self._commit(arrival))

    async def close(self) -> None:
        self._watchdog.close()
        await self._stream.close()

    def _commit(self, arrival: Arrival) -> Events:
        events = self._core.commit(arrival.result)
        trace = self._traces.commit_oldest(arrival.received_ns, time.monotonic_ns(), arrival.timings)
        self._estimate.learn(trace)
        self._core.set_costs(self._estimate.costs)
        self._watchdog.reset()
        return events

    async def _send_plans_and_tell(self, events: Events) -> None:
        async def tell() -> None:
            self._tell(events)

        # The task starts when this one first waits: once the first plan is on its way, or below if there is no plan.
        telling = asyncio.create_task(tell())
        try:
            await self._send_plans()
        finally:
            await telling

    async def _send_plans(self) -> None:
        while (plan := self._next_plan()) is not None:
            if self._core.num_in_flight == 1:
                self._watchdog.reset()
            trace = StepTrace.of_plan(plan, self._loads.follow(plan))
            self._traces.add(trace)
            try:
                async with asyncio.timeout(self._step_timeout_s):
                    await self._stream.send(plan)
            except TimeoutError:
                raise ExecutorLost(f"took no plan for {self._step_timeout_s:g} s") from None
            trace.sent_ns = time.monotonic_ns()

    def _next_plan(self) -> StepPlan | None:
        """Returns the next plan, or None if there is none or it is delayed."""
        self._signal.raise_error()
        self._delayed_until_s = self._timing.delayed_until_s(self._core, self._traces)
        if self._delayed_until_s is not None:
            return None
        started_s = time.perf_counter()
        plan = self._core.schedule()
        if plan is not None:
            self._on_plan(self._core, plan, time.perf_counter() - started_s)
        return plan

    async def _sleep(self) -> None:
        """Waits until an event occurs or is due. Returns at once if one has occurred already."""
        if self._signal.is_set:
            return
        num_in_flight = self._core.num_in_flight
        self._watchdog.check(num_in_flight)
        if not num_in_flight and not self._core.num_unfinished_requests:
            self._check_core()
        times_s = (self._core.next_wake_s, self._watchdog.due_s(num_in_flight), self._delayed_until_s)
        await self._signal.wait_until(min((time_s for time_s in times_s if time_s is not None), default=None))

    def _check_core(self) -> None:
        """Checks the core's invariants if a check is due. Raises InvariantViolation."""
        now_s = time.monotonic()
        if now_s - self._checked_at_s > CHECK_INTERVAL_S:
            check_invariants(self._core)
            self._checked_at_s = now_s


def log_exceptions(observer: PlanObserver) -> PlanObserver:
    """Returns an observer that logs exceptions of `observer`, so that the engine continues.

    Only the first of several failures in a row is logged, because there is a plan every few milliseconds.
    """
    is_failing = False

    def observe(core: Scheduler, plan: StepPlan, duration_s: float) -> None:
        nonlocal is_failing
        try:
            observer(core, plan, duration_s)
            is_failing = False
        except Exception:
            unexpected("plan_observer")
            if not is_failing:
                log.exception("an observer of plans failed")
            is_failing = True

    return observe
