"""The GPU's runner behind the device thread, with plans in flight and a device that fails later."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from executor.cuda.accelerator import EagerAccelerator
from executor.device.device_thread import DeviceThread
from executor.device.work import FailureKind, Step
from executor.plans.plan import StepOutput, StepPlan
from tests.support.cuda.comparison import ALL_KINDS, _counts, _first_plan, assert_same
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, make_pair
from tests.support.executor.plan_driver import PlanDriver

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="uses a simulated device that fails on demand")
TIMEOUT_S = 60


class LateCopy:
    """A copy that arrives or fails when the gate opens."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, gate: threading.Event, error: Exception | None):
        self._source, self._target, self._gate, self._error = source, target, gate, error

    def wait(self) -> None:
        assert self._gate.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error
        with torch.inference_mode():
            self._target.copy_(self._source)


class LateDevice(EagerAccelerator):
    """A device whose results arrive on the host when the gate opens.

    errors, send_errors: errors of the next copies to the host and to the device, None for those that succeed.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.errors: list[Exception | None] = []
        self.send_errors: list[Exception | None] = []

    def send(self, host: torch.Tensor) -> torch.Tensor:
        if self.send_errors and (error := self.send_errors.pop(0)) is not None:
            raise error
        return super().send(host)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: object) -> LateCopy:
        target.fill_(0x55)
        return LateCopy(source, target, self.gate, self.errors.pop(0) if self.errors else None)


class Harness:
    def __init__(self, directory: object) -> None:
        self.device = LateDevice()
        both = make_pair(directory, DEVICE, self.device)
        self.runner, self.reference = both.cuda, both.reference
        self.outcomes: queue.SimpleQueue = queue.SimpleQueue()
        self.lost = threading.Event()
        self.is_sane = True
        self.thread = DeviceThread(
            self.runner,
            prepare=lambda: None,
            device_is_sane=lambda: self.is_sane,
            device_lost=self.lost.set,
        )

    def put(self, plan: object) -> None:
        self.thread.put(Step(plan, arrived_ns=0, deliver=self.outcomes.put))

    def outcome(self) -> object:
        return self.outcomes.get(timeout=TIMEOUT_S)


@pytest.fixture
def harness(checkpoint):
    harness = Harness(checkpoint("llama-biases").directory)
    yield harness
    harness.device.gate.set()
    harness.thread.stop()


def plans(harness: Harness, prompt: list[int], epoch: int) -> list[StepPlan]:
    """Returns the plans of a prompt and two decodes."""
    driver = PlanDriver(harness.reference, epoch)
    driver.admit(prompt, 9)
    return [_first_plan(driver), *(StepPlan(epoch, step_id, row_counts=_counts(step_id)) for step_id in (2, 3))]


def test_plans_are_launched_before_results_arrive(harness, checkpoint) -> None:
    own = plans(harness, checkpoint("llama-biases").prompt(5), 1)
    for plan in own:
        harness.put(plan)
    while len(harness.runner._launched) < 3:
        assert harness.thread.is_alive
    assert harness.outcomes.empty()
    harness.thread.probe()
    assert harness.thread.silent_s() > 0
    harness.device.gate.set()
    for plan in own:
        assert_same(harness.outcome(), harness.reference.execute(plan))


def test_results_keep_their_order(harness) -> None:
    harness.device.gate.set()
    stream, expected = RandomStream(harness.reference.limits, seed=48), []
    for num_out in range(15):
        plan = stream.plan()
        expected.append(harness.reference.execute(plan))
        harness.put(plan)
        if num_out >= 1:
            output = harness.outcome()
            assert_same(output, expected[num_out - 1])
            assert output.timings.queue_ns > 0
            stream.learn(output)
    assert min(stream.seen[kind] for kind in ALL_KINDS) > 0


def test_a_step_that_fails_late_ends_its_epoch(harness, checkpoint) -> None:
    harness.device.errors = [None, RuntimeError("illegal address")]
    for epoch in (1, 2):
        for plan in plans(harness, checkpoint("llama-biases").prompt(5), epoch):
            harness.put(plan)
        harness.device.gate.set()
        first, second = harness.outcome(), harness.outcome()
        assert isinstance(first, StepOutput)
        assert first.step_id == 1
        if epoch == 1:
            assert second.kind is FailureKind.INTERNAL
            assert second.message == "step 2: RuntimeError: illegal address"
        else:
            assert [second.step_id, harness.outcome().step_id] == [2, 3]
    assert harness.outcomes.empty()
    assert not harness.lost.is_set()


def test_rows_of_a_failed_send_are_sent_again(harness, checkpoint) -> None:
    """The first epoch's decode fails before its rows are sent, and the second epoch's has the same rows."""
    harness.device.gate.set()
    harness.device.send_errors = [None, torch.OutOfMemoryError("no room"), torch.OutOfMemoryError("still none")]
    for epoch in (1, 2):
        for plan in plans(harness, checkpoint("llama").prompt(5), epoch):
            harness.put(plan)
            if epoch == 2 or plan.step_id == 1:
                assert_same(harness.outcome(), harness.reference.execute(plan))
            elif plan.step_id == 2:
                assert harness.outcome().kind is FailureKind.INTERNAL
        harness.reference.reset()
    assert harness.device.send_errors == []


def test_a_late_failure_inspects_the_device(harness, checkpoint) -> None:
    harness.device.errors, harness.is_sane = [RuntimeError("gone")], False
    harness.put(plans(harness, checkpoint("llama-biases").prompt(5), 1)[0])
    harness.device.gate.set()
    assert harness.outcome().kind is FailureKind.INTERNAL
    assert harness.lost.wait(TIMEOUT_S)
