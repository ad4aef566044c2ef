"""The one thread that touches the device. It knows neither gRPC nor asyncio: work comes in by a queue, outcomes leave
by a callback.

Work is done in the order it was put. Epochs come with it: the first plan of a newer epoch empties the slots, plans of
older epochs are dropped, and after a failure the rest of its epoch is dropped too.

A runner either computes a step at once, or launches it and leaves the waiting to others. Launched steps are finished by
the results thread while this one launches the next; a failure that comes to light there counts as the step's own.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Protocol

from executor.device.results_thread import LaunchedStep, ResultsThread, Unfinished
from executor.errors import PlanRejected
from executor.plans.plan import StepOutput, StepPlan

_log = logging.getLogger(__name__)

_PATIENCE_S = 0.05
"""An idle time that has lasted so long may last longer."""


class FailureKind(Enum):
    """Whose fault it is that a stream ends."""

    PLAN_REJECTED = "plan rejected"
    EPOCH_REFUSED = "epoch refused"
    TAKEN_OVER = "taken over"
    INTERNAL = "internal"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Failure:
    """The stream ends, with this message for the scheduler."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class EndOfPlans:
    """The scheduler sends no more plans; all results are out."""


Outcome = StepOutput | Failure | EndOfPlans
Deliver = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A plan to run. arrived_ns on the monotonic clock."""

    plan: StepPlan
    arrived_ns: int
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class Marker:
    """Nothing to run: the outcome is delivered once all work before it is done."""

    outcome: Failure | EndOfPlans
    deliver: Deliver


class Runner(Protocol):
    """`executor.device.runner.ModelRunner` or `executor.cuda.runner.CudaRunner`, as far as this thread cares.

    execute  raises PlanRejected, and then nothing has changed; may call `computing` when it has nothing left to do but
             compute
    """

    def reset(self) -> None: ...
    def execute(self, plan: StepPlan, computing: Callable[[], None]) -> StepOutput | LaunchedStep: ...


@dataclass(frozen=True, slots=True)
class LivenessProbe:
    """Do both threads move? `answered` is called on the results thread, once all work before it is done."""

    answered: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Inspection:
    """A step has failed late: is the device still there?"""

    failure: Failure


class DeviceThread:
    """Starts at once; `stop` ends it after the step it is at.

    prepare         called first, on the new thread: thread-local settings of the libraries
    device_is_sane  called after an exception from a step, outside any step
    device_lost     called on this thread, once, when the device is not sane any more; the thread then ends
    idle_work       taken a turn at a time while no step has come for a while
    """

    def __init__(
        self,
        runner: Runner,
        prepare: Callable[[], None],
        device_is_sane: Callable[[], bool],
        device_lost: Callable[[], None],
        idle_work: Iterator[None] | None = None,
    ) -> None:
        self._runner = runner
        self._prepare = prepare
        self._device_is_sane = device_is_sane
        self._device_lost = device_lost
        self._idle_work = idle_work
        self._patience_s = _PATIENCE_S
        self._work: queue.SimpleQueue[Step | Marker | LivenessProbe | _Inspection | None] = queue.SimpleQueue()
        self._results = ResultsThread()
        self._untold: Callable[[], None] | None = None
        self._is_stopping = False
        self._epoch = 0
        # Written by both threads, each time to the greater of two: under the lock.
        self._failed_epoch = 0
        self._failing = threading.Lock()
        # The results thread's own: the last epoch that failed late.
        self._late_epoch = 0
        self._asked_ns: int | None = None
        self._moved_ns = 0
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def put(self, work: Step | Marker | LivenessProbe) -> None:
        self._work.put(work)

    def stop(self) -> None:
        """Returns when the threads have ended. Work that was not begun is dropped, its callbacks are not called; what
        was launched is finished."""
        self._is_stopping = True
        self._work.put(None)
        self._thread.join()
        self._results.stop()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def look(self) -> None:
        """Asks the threads whether they move, unless they owe an answer already. Call it now and then."""
        if self._asked_ns is None:
            self._asked_ns = time.monotonic_ns()
            self.put(LivenessProbe(self._answered))

    def silent_s(self) -> float:
        """For how long a question has been waiting without so much as a step's end meanwhile; 0 if none is waiting.

        So a step, however many wait behind it, and threads that have nothing to do are all looked at alike.
        """
        asked_ns = self._asked_ns
        return 0.0 if asked_ns is None else (time.monotonic_ns() - max(asked_ns, self._moved_ns)) * 1e-9

    def _answered(self) -> None:
        self._asked_ns = None

    def _run(self) -> None:
        self._prepare()
        idle_since_ns = time.monotonic_ns()
        while (work := self._next_work()) is not None:
            if not isinstance(work, Step):
                self._tell()
            if isinstance(work, _Inspection):
                if not self._survives(work.failure):
                    return
            elif isinstance(work, LivenessProbe):
                self._results.put(work.answered)
            elif isinstance(work, Marker):
                self._results.put(partial(work.deliver, work.outcome))
            elif not self._is_stopping and work.plan.epoch >= self._epoch and work.plan.epoch > self._failed_epoch:
                outcome = self._step(work, time.monotonic_ns(), idle_since_ns)
                self._patience_s = _PATIENCE_S
                self._moved_ns = idle_since_ns = time.monotonic_ns()
                self._tell()
                if outcome is not None:
                    self._untold = partial(work.deliver, outcome)
                if isinstance(outcome, Failure):
                    self._tell()
                    self._results.put(partial(self._work.put, _Inspection(outcome)))
        self._tell()

    def _next_work(self) -> Step | Marker | LivenessProbe | _Inspection | None:
        """Waits for it. Between two steps of a busy time nothing else is begun: it would make the second one wait."""
        if self._work.empty():
            self._tell()
        while self._idle_work is not None:
            try:
                return self._work.get(timeout=self._patience_s)
            except queue.Empty:
                self._patience_s = 0.0
                self._take_a_turn(self._idle_work)
        return self._work.get()

    def _take_a_turn(self, idle_work: Iterator[None]) -> None:
        try:
            next(idle_work)
        except StopIteration:
            self._idle_work = None

    def _tell(self) -> None:
        """Has the last step's outcome delivered, by the results thread, if it was not yet.

        Whoever is told wakes up, and wants a processor and Python's lock at once. While another step waits, this thread
        needs both to begin it: so the outcome is told when that one computes, which needs no lock.
        """
        if self._untold is not None:
            self._results.put(self._untold)
            self._untold = None

    def _step(self, work: Step, taken_ns: int, idle_since_ns: int) -> Outcome | None:
        """None if the step was launched: its outcome is delivered when there is one."""
        plan = work.plan
        if plan.epoch > self._epoch:
            self._epoch = plan.epoch
            self._runner.reset()
        try:
            output = self._runner.execute(plan, self._tell)
        except PlanRejected as error:
            self._fail_epoch(plan.epoch)
            return Failure(FailureKind.PLAN_REJECTED, f"step {plan.step_id}: {error}")
        except Exception as error:  # noqa: BLE001  # whatever it was: it ends this epoch, the next starts empty
            _log.exception("step %d of epoch %d failed", plan.step_id, plan.epoch)
            self._fail_epoch(plan.epoch)
            return _internal(plan, error)
        queue_ns = taken_ns - work.arrived_ns
        if not isinstance(output, StepOutput):
            self._results.put(self._unfinished(work, output, queue_ns))
            return None
        timings = replace(output.timings, queue_ns=queue_ns, idle_ns=max(0, taken_ns - idle_since_ns))
        return replace(output, timings=timings)

    def _unfinished(self, work: Step, launched: LaunchedStep, queue_ns: int) -> Unfinished:
        """What to do with the step's outcome; on the results thread."""

        def finished(output: StepOutput) -> None:
            self._moved_ns = time.monotonic_ns()
            if work.plan.epoch > self._late_epoch:
                work.deliver(replace(output, timings=replace(output.timings, queue_ns=queue_ns)))

        def failed(error: Exception) -> None:
            self._moved_ns = time.monotonic_ns()
            if work.plan.epoch > self._late_epoch:
                self._late_epoch = work.plan.epoch
                self._fail_epoch(work.plan.epoch)
                failure = _internal(work.plan, error)
                work.deliver(failure)
                self._work.put(_Inspection(failure))

        return Unfinished(launched, finished, failed)

    def _fail_epoch(self, epoch: int) -> None:
        with self._failing:
            self._failed_epoch = max(self._failed_epoch, epoch)

    def _survives(self, failure: Failure) -> bool:
        if failure.kind is not FailureKind.INTERNAL or self._device_is_sane():
            return True
        _log.critical("the device does not answer any more")
        self._device_lost()
        return False


def _internal(plan: StepPlan, error: Exception) -> Failure:
    return Failure(FailureKind.INTERNAL, f"step {plan.step_id}: {type(error).__name__}: {error}")
