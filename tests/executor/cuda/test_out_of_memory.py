"""A device that runs out of memory in a capture, a launch or a copy: no sequence is lost, and no result differs."""

from __future__ import annotations

import queue
from collections import Counter

import pytest
import torch

from executor.cuda.accelerator import EagerAccelerator
from executor.device.device import device_is_sane
from executor.device.device_thread import DeviceThread
from executor.device.work import FailureKind, Step
from executor.plans.plan import StepOutput
from tests.support.cuda.comparison import assert_same, run_stream
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, Pair, make_pair, no_progress

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="uses a simulated device that fails on demand")
NUM_STEPS = 15
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: out of memory"),
)


class FullDevice(EagerAccelerator):
    """A device without memory for some of its work.

    fails: which calls of a kind fail, counted from 0 for each kind: "capture", "replay", "send". A call that fails has
    done nothing, like a launch that the driver refuses; a capture may fail before its first run or after it.
    """

    def __init__(self) -> None:
        self.fails: dict[str, set[int]] = {"capture": set(), "replay": set(), "send": set()}
        self.calls: Counter[str] = Counter()
        self.num_releases = 0

    def send(self, host: torch.Tensor) -> torch.Tensor:
        self._count("send")
        return super().send(host)

    def capture(self, body, memory):
        if self.calls["capture"] % 2:
            body()
        self._count("capture")

        def replay() -> None:
            self._count("replay")
            body()

        return replay

    def release(self) -> None:
        self.num_releases += 1

    def _count(self, kind: str) -> None:
        number = self.calls[kind]
        self.calls[kind] += 1
        if number in self.fails[kind]:
            raise ERRORS[number % len(ERRORS)]


def pair_on(device: FullDevice, checkpoint) -> Pair:
    return make_pair(checkpoint("llama-biases").directory, DEVICE, device)


def run(both: Pair, seed: int = 48) -> Counter[str]:
    stream = RandomStream(both.reference.limits, seed)
    run_stream(both, stream, num_ahead=2, num_steps=NUM_STEPS)
    return stream.seen


@pytest.mark.parametrize("missing", [{0}, {1, 2, 7}, set(range(8))])
def test_buckets_without_memory_run_without_their_graph(missing, checkpoint, caplog) -> None:
    device = FullDevice()
    both = pair_on(device, checkpoint)
    device.fails["capture"] = missing
    both.cuda.capture_graphs(no_progress)
    assert both.cuda.graphs.num_missing == len(missing) == device.num_releases
    assert len(both.cuda.graphs) == 8 - len(missing)
    assert caplog.text.count("no memory for the graph of") == len(missing)
    assert caplog.text.count("of 6 sequences (forward)") == (0 in missing)
    assert run(both)["row"] > 0
    assert (device.calls["replay"] == 0) == (len(missing) == 8)


def test_another_error_in_a_capture_is_raised(checkpoint) -> None:
    device = FullDevice()
    both = pair_on(device, checkpoint)

    def broken(body: object, memory: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device.capture = broken
    with pytest.raises(RuntimeError, match="illegal memory access"):
        both.cuda.capture_graphs(no_progress)


def test_steps_that_run_out_of_memory_once_are_repeated(checkpoint) -> None:
    """Every second call fails, at each position of a stream: each is made again, and nothing is applied twice."""
    device = FullDevice()
    both = pair_on(device, checkpoint)
    both.cuda.capture_graphs(no_progress)
    for first in (0, 1):
        device.calls.clear()
        device.num_releases = 0
        device.fails = {"capture": set(), "replay": set(range(first, 400)), "send": set(range(first, 400, 2))}
        seen = run(both)
        assert min(seen["fork"], seen["copy"], seen["admitted"]) > 0
        assert device.calls["send"] > NUM_STEPS
        assert device.calls["replay"] > 1
        assert device.num_releases >= device.calls["replay"] - first + device.calls["send"] // 2 - 1


def test_prompts_that_run_out_of_memory_once_are_computed_again(checkpoint, monkeypatch) -> None:
    """The model of every step with a prompt fails after it has written keys and values."""
    device = FullDevice()
    both = pair_on(device, checkpoint)
    model, is_second = both.cuda._forward.model, []
    hidden = type(model).hidden

    def failing(self, *args):
        result = hidden(self, *args)
        if self is model:
            is_second.append(len(is_second) % 2)
            if not is_second[-1]:
                raise torch.OutOfMemoryError("full")
        return result

    monkeypatch.setattr(type(model), "hidden", failing)
    monkeypatch.setattr("tests.executor.cuda.test_out_of_memory.NUM_STEPS", 12)
    seen = run(both)
    assert seen["row of a prompt"] > 0
    assert sum(is_second) == device.num_releases == len(is_second) // 2 > 5


def test_an_epoch_that_stays_out_of_memory_ends_and_the_next_one_is_served(checkpoint) -> None:
    device = FullDevice()
    both = pair_on(device, checkpoint)
    outcomes: queue.SimpleQueue = queue.SimpleQueue()
    lost: list[bool] = []
    thread = DeviceThread(
        both.cuda,
        prepare=lambda: None,
        device_is_sane=lambda: device_is_sane(DEVICE),
        device_lost=lambda: lost.append(True),
    )
    try:
        for epoch in (1, 2):
            stream = RandomStream(both.reference.limits, 48, epoch=epoch)
            both.reference.reset()
            device.fails["send"] = {device.calls["send"] + 6, device.calls["send"] + 7} if epoch == 1 else set()
            for _ in range(10):
                plan = stream.plan()
                thread.put(Step(plan, arrived_ns=0, deliver=outcomes.put))
                expected, outcome = both.reference.execute(plan), outcomes.get(timeout=60)
                if not isinstance(outcome, StepOutput):
                    break
                assert_same(outcome, expected)
                stream.learn(outcome)
            if epoch == 1:
                assert outcome.kind is FailureKind.INTERNAL
                assert "out of memory" in outcome.message.lower()
                assert 1 < plan.step_id < 10
        assert plan.step_id == 10
    finally:
        thread.stop()
    assert not lost
