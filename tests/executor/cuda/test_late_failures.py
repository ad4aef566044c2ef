"""The GPU's runner behind the device thread: two plans out, and a device that fails when nobody looks."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from executor.cuda.accelerator import EagerAccelerator
from executor.device.device_thread import DeviceThread, FailureKind, Step
from executor.plans.plan import StepOutput, StepPlan
from tests.executor.cuda.test_runner import ALL_KINDS, _counts, _first_plan, assert_same
from tests.support.cuda.places import DEVICE, make_pair
from tests.support.cuda.streams import RandomStream
from tests.support.executor.conductor import Conductor

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a device of its own, which fails when told to")
TIMEOUT_S = 60


class LateCopy:
    """Arrives when the gate opens, or fails then."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, gate: threading.Event, error: Exception | None):
        self._source, self._target, self._gate, self._error = source, target, gate, error

    def wait(self) -> None:
        assert self._gate.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error
        with torch.inference_mode():
            self._target.copy_(self._source)


class LateDevice(EagerAccelerator):
    """Its results are on the host when the gate opens.

    errors, send_errors: of the next copies to the host and from it, None for those that succeed.
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


class Bench:
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
def bench(checkpoint):
    bench = Bench(checkpoint("llama-biases").directory)
    yield bench
    bench.device.gate.set()
    bench.thread.stop()


def plans(bench: Bench, prompt: list[int], epoch: int) -> list[StepPlan]:
    """A prompt and two decodes."""
    conductor = Conductor(bench.reference, epoch)
    conductor.admit(prompt, 9)
    return [_first_plan(conductor), *(StepPlan(epoch, step_id, row_counts=_counts(step_id)) for step_id in (2, 3))]


def test_plans_are_launched_before_a_result_is_there(bench, checkpoint) -> None:
    own = plans(bench, checkpoint("llama-biases").prompt(5), 1)
    for plan in own:
        bench.put(plan)
    while len(bench.runner._launched) < 3:
        assert bench.thread.is_alive
    assert bench.outcomes.empty()
    bench.thread.probe()
    assert bench.thread.silent_s() > 0
    bench.device.gate.set()
    for plan in own:
        assert_same(bench.outcome(), bench.reference.execute(plan))


def test_results_keep_their_order(bench) -> None:
    bench.device.gate.set()
    stream, expected = RandomStream(bench.reference.limits, seed=48), []
    for num_out in range(15):
        plan = stream.plan()
        expected.append(bench.reference.execute(plan))
        bench.put(plan)
        if num_out >= 1:
            output = bench.outcome()
            assert_same(output, expected[num_out - 1])
            assert output.timings.queue_ns > 0
            stream.learn(output)
    assert min(stream.seen[kind] for kind in ALL_KINDS) > 0


def test_a_step_that_fails_late_ends_its_epoch(bench, checkpoint) -> None:
    bench.device.errors = [None, RuntimeError("illegal address")]
    for epoch in (1, 2):
        for plan in plans(bench, checkpoint("llama-biases").prompt(5), epoch):
            bench.put(plan)
        bench.device.gate.set()
        first, second = bench.outcome(), bench.outcome()
        assert isinstance(first, StepOutput)
        assert first.step_id == 1
        if epoch == 1:
            assert second.kind is FailureKind.INTERNAL
            assert second.message == "step 2: RuntimeError: illegal address"
        else:
            assert [second.step_id, bench.outcome().step_id] == [2, 3]
    assert bench.outcomes.empty()
    assert not bench.lost.is_set()


def test_what_was_never_sent_is_sent_again(bench, checkpoint) -> None:
    """The decode of the first epoch fails before its rows are on the device; that of the second has the same rows."""
    bench.device.gate.set()
    bench.device.send_errors = [None, torch.OutOfMemoryError("no room")]
    for epoch in (1, 2):
        for plan in plans(bench, checkpoint("llama").prompt(5), epoch):
            bench.put(plan)
            if epoch == 2 or plan.step_id == 1:
                assert_same(bench.outcome(), bench.reference.execute(plan))
            elif plan.step_id == 2:
                assert bench.outcome().kind is FailureKind.INTERNAL
        bench.reference.reset()
    assert bench.device.send_errors == []


def test_a_late_failure_asks_for_the_device(bench, checkpoint) -> None:
    bench.device.errors, bench.is_sane = [RuntimeError("gone")], False
    bench.put(plans(bench, checkpoint("llama-biases").prompt(5), 1)[0])
    bench.device.gate.set()
    assert bench.outcome().kind is FailureKind.INTERNAL
    assert bench.lost.wait(TIMEOUT_S)
