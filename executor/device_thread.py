"""The one thread that touches the device. It knows neither gRPC nor asyncio: work comes in by a queue, outcomes leave
by a callback.

Work is done in the order it was put. Epochs come with it: the first plan of a newer epoch empties the slots, plans of
older epochs are dropped, and after a failure the rest of its epoch is dropped too.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from executor.errors import PlanRejected
from executor.plan import StepOutput, StepPlan

_log = logging.getLogger(__name__)


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
class Echo:
    """Nothing to run: the outcome is delivered once all work before it is done."""

    outcome: Failure | EndOfPlans
    deliver: Deliver


class Runner(Protocol):
    """`executor.runner.ModelRunner`, as far as this thread cares."""

    def reset(self) -> None: ...
    def execute(self, plan: StepPlan) -> StepOutput: ...


class DeviceThread:
    """Starts at once; `stop` ends it after the step it is at.

    prepare         called first, on the new thread: thread-local settings of the libraries
    device_is_sane  called after an exception from a step, outside any step
    device_lost     called on this thread, once, when the device is not sane any more; the thread then ends
    """

    def __init__(
        self,
        runner: Runner,
        prepare: Callable[[], None],
        device_is_sane: Callable[[], bool],
        device_lost: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._prepare = prepare
        self._device_is_sane = device_is_sane
        self._device_lost = device_lost
        self._work: queue.SimpleQueue[Step | Echo | None] = queue.SimpleQueue()
        self._epoch = 0
        self._failed_epoch = 0
        self._busy_since_ns: int | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def put(self, work: Step | Echo) -> None:
        self._work.put(work)

    def stop(self) -> None:
        """Returns when the thread has ended. Work that was not begun is dropped, its callbacks are not called."""
        self._work.put(None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def busy_s(self) -> float:
        """For how long the current step has been running; 0 between steps."""
        since_ns = self._busy_since_ns
        return 0.0 if since_ns is None else (time.monotonic_ns() - since_ns) * 1e-9

    def _run(self) -> None:
        self._prepare()
        idle_since_ns = time.monotonic_ns()
        while (work := self._work.get()) is not None:
            if isinstance(work, Echo):
                work.deliver(work.outcome)
            elif work.plan.epoch >= self._epoch and work.plan.epoch > self._failed_epoch:
                self._busy_since_ns = time.monotonic_ns()
                outcome = self._step(work, self._busy_since_ns, idle_since_ns)
                self._busy_since_ns = None
                idle_since_ns = time.monotonic_ns()
                work.deliver(outcome)
                if isinstance(outcome, Failure) and not self._survives(outcome):
                    return

    def _step(self, work: Step, taken_ns: int, idle_since_ns: int) -> Outcome:
        if work.plan.epoch > self._epoch:
            self._epoch = work.plan.epoch
            self._runner.reset()
        try:
            output = self._runner.execute(work.plan)
        except PlanRejected as error:
            self._failed_epoch = self._epoch
            return Failure(FailureKind.PLAN_REJECTED, f"step {work.plan.step_id}: {error}")
        except Exception as error:  # noqa: BLE001  # whatever it was: it ends this epoch, the next starts empty
            _log.exception("step %d of epoch %d failed", work.plan.step_id, self._epoch)
            self._failed_epoch = self._epoch
            return Failure(FailureKind.INTERNAL, f"step {work.plan.step_id}: {type(error).__name__}: {error}")
        timings = replace(output.timings, queue_ns=taken_ns - work.arrived_ns, idle_ns=max(0, taken_ns - idle_since_ns))
        return replace(output, timings=timings)

    def _survives(self, failure: Failure) -> bool:
        if failure.kind is not FailureKind.INTERNAL or self._device_is_sane():
            return True
        _log.critical("the device does not answer any more")
        self._device_lost()
        return False
