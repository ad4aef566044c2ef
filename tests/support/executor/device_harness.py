"""A device thread with a fake runner, for tests of the device thread."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from executor.device.device_thread import DeviceThread
from executor.device.work import EndOfPlans, Marker, Outcome, Step
from executor.plans.plan import StepOutput, StepPlan
from tests.support.executor.fake_runner import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Harness:
    """A device thread, with a queue of everything it delivers."""

    def __init__(self, runner: FakeRunner | None = None, idle_work: Iterator[None] | None = None) -> None:
        self.runner = runner or FakeRunner()
        self.is_sane = True
        self.lost = threading.Event()
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.prepared_on: list[threading.Thread] = []
        self.thread = DeviceThread(
            self.runner,
            prepare=lambda: self.prepared_on.append(threading.current_thread()),
            device_is_sane=lambda: self.is_sane,
            device_lost=self.lost.set,
            idle_work=idle_work,
        )

    def put(self, epoch: int, step_id: int) -> None:
        self.thread.put(Step(StepPlan(epoch, step_id), arrived_ns=0, deliver=self.outcomes.put))

    def flush(self) -> list[Outcome]:
        """Waits for all work so far and returns its outcomes."""
        end = EndOfPlans()
        self.thread.put(Marker(end, self.outcomes.put))
        outcomes = []
        while (outcome := self.outcomes.get(timeout=10)) is not end:
            outcomes.append(outcome)
        return outcomes


class LateRunner(FakeRunner):
    """A runner that launches at once. A step finishes or fails when its own gate opens.

    late_errors  errors that `finish` raises, by step id
    """

    def __init__(self) -> None:
        super().__init__()
        self.late_errors: dict[int, Exception] = {}
        self.gates: dict[int, threading.Event] = {step_id: threading.Event() for step_id in range(1, 6)}

    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> LateStep:
        return LateStep(self, super().execute(plan, computing))


class LateStep:
    def __init__(self, runner: LateRunner, output: StepOutput) -> None:
        self._runner, self._output = runner, output

    def finish(self) -> StepOutput:
        assert self._runner.gates[self._output.step_id].wait(30)
        if self._output.step_id in self._runner.late_errors:
            raise self._runner.late_errors[self._output.step_id]
        return self._output


def steps(outcomes: list[Outcome]) -> list[tuple[int, int]]:
    """Returns (epoch, step id) of outcomes that are all results."""
    assert all(isinstance(outcome, StepOutput) for outcome in outcomes)
    return [(outcome.epoch, outcome.step_id) for outcome in outcomes]
