"""The only thread that uses the device. It knows neither gRPC nor asyncio: work comes from a queue, outcomes go to
callbacks.

Work is done in the order in which it was put. The beginning of a lease or the first plan of a newer epoch empties the
slots, plans of older epochs are dropped, and after a failure the rest of its epoch is dropped too.

A runner either computes a step at once, or launches it without waiting. The results thread finishes launched steps
while this thread launches the next one; a failure that only appears there counts as a failure of the step.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from executor.device.results_thread import LaunchedStep, ResultsThread, Runner, Unfinished
from executor.device.steps_under_way import StepsUnderWay
from executor.device.work import Begin, Failure, FailureKind, LivenessProbe, Marker, Outcome, Step
from executor.errors import ModelBroken, PlanRejected
from executor.plans.plan import StepOutput, StepPlan
from quire.unexpected import unexpected

_log = logging.getLogger(__name__)

_IDLE_DELAY_S = 0.05
"""Time without a step after which idle work begins."""


@dataclass(frozen=True, slots=True)
class _Inspection:
    """A check of the device after a step has failed."""

    failure: Failure


_Work = Begin | Step | Marker | LivenessProbe | _Inspection


class DeviceThread:
    """A thread that starts at once; `stop` ends it after the current step.

    prepare         called first on the new thread, for thread-local settings of libraries
    device_is_sane  called between steps after a step has raised an error
    device_lost     called once on this thread when the device is no longer sane; the thread then ends
    idle_work       advanced one item at a time while no step arrives
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
        self._idle_delay_s = _IDLE_DELAY_S
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._results = ResultsThread()
        self._pending: Callable[[], None] | None = None
        self._is_stopping = False
        self._epoch = 0
        # Written by both threads under the lock, and only ever increased.
        self._failed_epoch = 0
        self._failing = threading.Lock()
        # False once a step has failed, until a lease has begun without the blocks that were there before.
        self._is_pool_trusted = True
        # The last epoch that failed late. Only the results thread uses it.
        self._late_epoch = 0
        self._idle_since_ns = time.monotonic_ns()
        self._under_way = StepsUnderWay()
        self._probed_ns: int | None = None
        self._progress_ns = 0
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def put(self, work: Begin | Step | Marker | LivenessProbe) -> None:
        self._work.put(work)

    def stop(self) -> None:
        """Returns when both threads have ended. Launched steps are finished; work that has not begun is dropped."""
        self._is_stopping = True
        self._work.put(None)
        self._thread.join()
        self._results.stop()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def busy_since_s(self) -> float | None:
        """Returns since when steps have been under way (time.monotonic); None if none is."""
        return self._under_way.busy_since_s

    def probe(self) -> None:
        """Starts a probe of both threads unless one is under way. Call it at intervals."""
        if self._probed_ns is None:
            self._probed_ns = time.monotonic_ns()
            self.put(LivenessProbe(self._answered))

    def silent_s(self) -> float:
        """Returns for how long a probe has waited while no step ended, even if steps wait behind it; 0 without one."""
        probed_ns = self._probed_ns
        return 0.0 if probed_ns is None else (time.monotonic_ns() - max(probed_ns, self._progress_ns)) * 1e-9

    def _answered(self) -> None:
        self._probed_ns = None

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:  # noqa: BLE001  # priorities and numbers of threads are no reason not to serve
            _log.exception("the device thread could not be prepared")
            unexpected("preparation")
        self._idle_since_ns = time.monotonic_ns()
        while self._handle(self._next_work()):
            pass

    def _handle(self, work: _Work | None) -> bool:
        """Does one piece of work; False ends the thread. An error drops it: all that wait for it have timeouts."""
        try:
            return self._do(work)
        except Exception as error:  # noqa: BLE001  # see above
            _log.exception("the device thread failed between steps")
            unexpected("between_steps")
            if isinstance(work, Step):
                self._under_way.end(work.plan.epoch, work.plan.step_id)
                self._fail_epoch(work.plan.epoch)
                self._results.put(partial(work.deliver, _internal(work.plan, error)))
            return work is not None

    def _do(self, work: _Work | None) -> bool:
        if not isinstance(work, Step):
            self._deliver_pending()
        if work is None:
            return False
        if isinstance(work, _Inspection):
            return self._passes_inspection(work.failure)
        if isinstance(work, LivenessProbe):
            self._results.put(work.answered)
        elif isinstance(work, Marker):
            self._results.put(partial(work.deliver, work.outcome))
        elif isinstance(work, Begin):
            self._begin(work)
        elif not self._is_stopping and work.plan.epoch >= self._epoch and work.plan.epoch > self._failed_epoch:
            self._under_way.begin(work.plan.epoch, work.plan.step_id)
            outcome = self._step(work, time.monotonic_ns(), self._idle_since_ns)
            self._idle_delay_s = _IDLE_DELAY_S
            self._progress_ns = self._idle_since_ns = time.monotonic_ns()
            self._deliver_pending()
            if outcome is not None:
                self._under_way.end(work.plan.epoch, work.plan.step_id)
                self._pending = partial(work.deliver, outcome)
            if isinstance(outcome, Failure):
                self._deliver_pending()
                self._results.put(partial(self._work.put, _Inspection(outcome)))
        return True

    def _next_work(self) -> _Work | None:
        """Waits for work. Does idle work meanwhile, but not in the short pauses between steps under load."""
        if self._work.empty():
            self._deliver_pending()
        while self._idle_work is not None:
            try:
                return self._work.get(timeout=self._idle_delay_s)
            except queue.Empty:
                self._idle_delay_s = 0.0
                self._advance_idle_work(self._idle_work)
        return self._work.get()

    def _advance_idle_work(self, idle_work: Iterator[None]) -> None:
        try:
            next(idle_work)
        except StopIteration:
            self._idle_work = None
        except Exception:  # noqa: BLE001  # it only makes later steps faster
            _log.exception("idle work failed, and is given up")
            unexpected("idle_work")
            self._idle_work = None

    def _deliver_pending(self) -> None:
        """Lets the results thread deliver the last step's outcome, unless it has been delivered.

        The receiver needs a core and Python's global interpreter lock, and so does this thread to begin the next step.
        The outcome is therefore delivered while that step computes, which needs no lock.
        """
        if self._pending is not None:
            self._results.put(self._pending)
            self._pending = None

    def _begin(self, work: Begin) -> None:
        """Begins a lease, unless a newer one has begun, whose stream has ended this one."""
        if work.epoch > self._epoch:
            self._epoch = work.epoch
            retained = self._runner.reset(work.digest_scheme, is_trusted=self._is_pool_trusted)
            self._is_pool_trusted = True
            self._results.put(partial(work.deliver, retained))

    def _step(self, work: Step, taken_ns: int, idle_since_ns: int) -> Outcome | None:
        """Runs a step. Returns None if it was launched: the results thread then delivers its outcome."""
        plan = work.plan
        try:
            if plan.epoch > self._epoch:
                self._epoch = plan.epoch
                self._runner.reset()
            output = self._runner.execute(plan, self._deliver_pending)
        except PlanRejected as error:
            self._fail_epoch(plan.epoch)
            return Failure(FailureKind.PLAN_REJECTED, f"step {plan.step_id}: {error}")
        except Exception as error:  # noqa: BLE001  # any error ends this epoch; the next one starts empty
            _log.exception("step %d of epoch %d failed", plan.step_id, plan.epoch)
            unexpected("step")
            self._is_pool_trusted = False
            self._fail_epoch(plan.epoch)
            return _internal(plan, error)
        queue_ns = taken_ns - work.arrived_ns
        if not isinstance(output, StepOutput):
            self._results.put(self._unfinished(work, output, queue_ns))
            return None
        timings = replace(output.timings, queue_ns=queue_ns, idle_ns=max(0, taken_ns - idle_since_ns))
        return replace(output, timings=timings)

    def _unfinished(self, work: Step, launched: LaunchedStep, queue_ns: int) -> Unfinished:
        """Returns a launched step with callbacks that deliver its outcome on the results thread."""

        def finished(output: StepOutput) -> None:
            self._under_way.end(work.plan.epoch, work.plan.step_id)
            self._progress_ns = time.monotonic_ns()
            if work.plan.epoch > self._late_epoch:
                work.deliver(replace(output, timings=replace(output.timings, queue_ns=queue_ns)))

        def failed(error: Exception) -> None:
            self._under_way.end(work.plan.epoch, work.plan.step_id)
            self._progress_ns = time.monotonic_ns()
            self._is_pool_trusted = False
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

    def _passes_inspection(self, failure: Failure) -> bool:
        if failure.kind is not FailureKind.INTERNAL or (not failure.is_fatal and self._device_is_sane()):
            return True
        problem = failure.message if failure.is_fatal else "the device no longer answers"
        _log.critical("%s; this executor exits", problem)
        self._device_lost()
        return False


def _internal(plan: StepPlan, error: Exception) -> Failure:
    message = f"step {plan.step_id}: {type(error).__name__}: {error}"
    return Failure(FailureKind.INTERNAL, message, is_fatal=isinstance(error, ModelBroken))
