"""The device thread: order, epochs, failures."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

import pytest

from executor.device.work import Failure, FailureKind
from executor.errors import ModelBroken, PlanRejected
from tests.support.executor.device_harness import Harness, steps
from tests.support.executor.fake_runner import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.plans.plan import StepOutput, StepPlan


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.runner.gate.set()
    harness.thread.stop()


def test_steps_run_in_order(harness) -> None:
    for step_id in (1, 2, 3):
        harness.put(7, step_id)
    outcomes = harness.flush()
    assert steps(outcomes) == harness.runner.executed == [(7, 1), (7, 2), (7, 3)]
    assert harness.runner.num_resets == 1
    assert harness.prepared_on[0].name == "device"
    for outcome in outcomes:
        assert outcome.timings.queue_ns > 0
        assert outcome.timings.idle_ns >= 0
        assert outcome.timings.forward_ns == 2_000


class Pausing(FakeRunner):
    """A runner that waits for `prepared` before it says that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = threading.Event()

    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        self.entered.set()
        assert self.prepared.wait(10)
        return super().execute(plan, computing)


def test_an_outcome_is_delivered_while_the_next_step_computes() -> None:
    """A receiver that wakes up earlier would take the core that prepares the next step."""
    runner = Pausing()
    harness = Harness(runner)
    try:
        harness.put(1, 1)
        harness.put(1, 2)
        assert runner.entered.wait(10)
        runner.entered.clear()
        runner.gate.clear()
        runner.prepared.set()  # the first step runs up to its gate …
        runner.entered.wait(10)
        runner.prepared.clear()
        runner.entered.clear()
        runner.gate.set()  # … and through it; the second step is held before it computes
        assert runner.entered.wait(10)
        with pytest.raises(queue.Empty):
            harness.outcomes.get(timeout=0.1)
        runner.gate.clear()
        runner.prepared.set()
        assert harness.outcomes.get(timeout=10).step_id == 1, "delivered while the second step computes"
        assert harness.outcomes.empty()
        runner.gate.set()
        assert harness.outcomes.get(timeout=10).step_id == 2, "delivered at once, as no step is waiting"
    finally:
        runner.prepared.set()
        runner.gate.set()
        harness.thread.stop()


def test_an_outcome_is_delivered_before_the_thread_ends(harness) -> None:
    harness.runner.gate.clear()
    harness.put(1, 1)
    assert harness.runner.entered.wait(10)
    stopping = threading.Thread(target=harness.thread.stop)
    stopping.start()
    harness.runner.gate.set()
    stopping.join(10)
    assert harness.outcomes.get(timeout=10).step_id == 1


def test_a_newer_epoch_empties_the_slots_and_drops_older_plans(harness) -> None:
    harness.put(1, 1)
    harness.put(2, 1)
    harness.put(1, 2)
    assert steps(harness.flush()) == [(1, 1), (2, 1)]
    assert harness.runner.num_resets == 2


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PlanRejected("no such block"), FailureKind.PLAN_REJECTED, "step 2: no such block"),
        (RuntimeError("shapes"), FailureKind.INTERNAL, "step 2: RuntimeError: shapes"),
    ],
)
def test_a_failure_ends_its_epoch_only(error, kind, message, harness) -> None:
    harness.runner.errors[2] = error
    for step_id in (1, 2, 3):
        harness.put(1, step_id)
    outcomes = harness.flush()
    assert steps(outcomes[:1]) == [(1, 1)]
    assert outcomes[1:] == [Failure(kind, message)]
    del harness.runner.errors[2]
    harness.put(2, 1)
    assert steps(harness.flush()) == [(2, 1)]
    assert not harness.lost.is_set()


def test_a_lost_device_ends_the_thread(harness) -> None:
    harness.is_sane = False
    harness.runner.errors[1] = RuntimeError("illegal memory access")
    harness.put(1, 1)
    assert harness.outcomes.get(timeout=10).kind is FailureKind.INTERNAL
    assert harness.lost.wait(10)
    harness.thread.stop()
    assert not harness.thread.is_alive


def test_a_broken_model_ends_the_thread_although_the_device_is_sane(harness) -> None:
    harness.runner.errors[1] = ModelBroken("NaN")
    harness.put(1, 1)
    assert harness.outcomes.get(timeout=10).kind is FailureKind.INTERNAL
    assert harness.lost.wait(10)


def test_a_rejected_plan_does_not_inspect_the_device(harness) -> None:
    harness.is_sane = False
    harness.runner.errors[1] = PlanRejected("no")
    harness.put(1, 1)
    harness.flush()
    assert harness.thread.is_alive
    assert not harness.lost.is_set()


def test_a_hanging_thread_is_silent(harness) -> None:
    harness.thread.probe()
    harness.flush()
    assert harness.thread.silent_s() == 0, "the thread is idle and answers"
    harness.runner.gate.clear()
    harness.put(1, 1)
    assert harness.thread.silent_s() == 0, "no probe is waiting"
    harness.thread.probe()
    before_s = harness.thread.silent_s()
    while harness.thread.silent_s() <= before_s:
        harness.thread.probe()
    harness.runner.gate.set()
    harness.flush()
    assert harness.thread.silent_s() == 0


def test_stop_drops_steps_that_have_not_begun(harness) -> None:
    harness.runner.gate.clear()
    for step_id in (1, 2, 3):
        harness.put(1, step_id)
    assert harness.runner.entered.wait(10)
    stopping = threading.Thread(target=harness.thread.stop)
    stopping.start()
    while not harness.thread._is_stopping:
        time.sleep(0.001)
    harness.runner.gate.set()
    stopping.join(10)
    assert steps([harness.outcomes.get_nowait()]) == harness.runner.executed == [(1, 1)]
    assert harness.outcomes.empty()


def test_idle_work_is_completed_between_steps() -> None:
    turns: list[int] = []
    done = threading.Event()

    def idle_work() -> Iterator[None]:
        for turn in range(3):
            turns.append(turn)
            yield
        done.set()

    harness = Harness(idle_work=idle_work())
    try:
        assert done.wait(10)
        assert turns == [0, 1, 2]
        harness.put(1, 1)
        assert steps(harness.flush()) == [(1, 1)]
    finally:
        harness.thread.stop()


def test_steps_do_not_wait_for_idle_work() -> None:
    """Steps that arrive during idle work run next, even if much idle work is left."""
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def idle_work() -> Iterator[None]:
        while True:
            done.append("turn")
            begun.set()
            go_on.wait(10)
            yield

    class Recording(FakeRunner):
        def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
            done.append("step")
            return super().execute(plan, computing)

    harness = Harness(Recording(), idle_work())
    try:
        assert begun.wait(10)
        for step_id in range(1, 6):
            harness.put(1, step_id)
        go_on.set()
        assert steps(harness.flush()) == [(1, step_id) for step_id in range(1, 6)]
        assert done[:6] == ["turn", *["step"] * 5]
    finally:
        harness.thread.stop()


@pytest.mark.parametrize("error", [None, PlanRejected("wrong"), RuntimeError("lost")])
def test_the_device_is_busy_while_a_step_computes(harness, error: Exception | None) -> None:
    assert harness.thread.busy_since_s() is None
    harness.runner.gate.clear()
    if error is not None:
        harness.runner.errors[1] = error
    before_s = time.monotonic()
    harness.put(1, 1)
    assert harness.runner.entered.wait(30)
    since_s = harness.thread.busy_since_s()
    assert since_s is not None
    assert before_s <= since_s <= time.monotonic()
    harness.runner.gate.set()
    harness.flush()
    assert harness.thread.busy_since_s() is None
