"""The device thread: order, epochs, failures."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

import pytest

from executor.device.device_thread import DeviceThread, EndOfPlans, Failure, FailureKind, Marker, Outcome, Step
from executor.errors import PlanRejected
from executor.plans.plan import StepOutput, StepPlan
from tests.support.executor.fake_runner import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Bench:
    """A device thread and everything it delivers."""

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

    def fence(self) -> list[Outcome]:
        """All outcomes so far."""
        end = EndOfPlans()
        self.thread.put(Marker(end, self.outcomes.put))
        outcomes = []
        while (outcome := self.outcomes.get(timeout=10)) is not end:
            outcomes.append(outcome)
        return outcomes


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.runner.gate.set()
    bench.thread.stop()


def steps(outcomes: list[Outcome]) -> list[tuple[int, int]]:
    assert all(isinstance(outcome, StepOutput) for outcome in outcomes)
    return [(outcome.epoch, outcome.step_id) for outcome in outcomes]


def test_steps_run_in_order(bench) -> None:
    for step_id in (1, 2, 3):
        bench.put(7, step_id)
    outcomes = bench.fence()
    assert steps(outcomes) == bench.runner.executed == [(7, 1), (7, 2), (7, 3)]
    assert bench.runner.num_resets == 1
    assert bench.prepared_on[0].name == "device"
    for outcome in outcomes:
        assert outcome.timings.queue_ns > 0
        assert outcome.timings.idle_ns >= 0
        assert outcome.timings.forward_ns == 2_000


class Pausing(FakeRunner):
    """Says that it computes when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = threading.Event()

    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        self.entered.set()
        assert self.prepared.wait(10)
        return super().execute(plan, computing)


def test_an_outcome_is_told_when_the_next_step_computes() -> None:
    """Whoever is told wakes up, and would take the processor that prepares the next step."""
    runner = Pausing()
    bench = Bench(runner)
    try:
        bench.put(1, 1)
        bench.put(1, 2)
        assert runner.entered.wait(10)
        runner.entered.clear()
        runner.gate.clear()
        runner.prepared.set()  # the first one goes up to its gate …
        runner.entered.wait(10)
        runner.prepared.clear()
        runner.entered.clear()
        runner.gate.set()  # … and through it; the second one is held before it computes
        assert runner.entered.wait(10)
        with pytest.raises(queue.Empty):
            bench.outcomes.get(timeout=0.1)
        runner.gate.clear()
        runner.prepared.set()
        assert bench.outcomes.get(timeout=10).step_id == 1, "while the second one computes"
        assert bench.outcomes.empty()
        runner.gate.set()
        assert bench.outcomes.get(timeout=10).step_id == 2, "at once: nothing waits"
    finally:
        runner.prepared.set()
        runner.gate.set()
        bench.thread.stop()


def test_an_outcome_is_told_before_the_thread_ends(bench) -> None:
    bench.runner.gate.clear()
    bench.put(1, 1)
    assert bench.runner.entered.wait(10)
    stopping = threading.Thread(target=bench.thread.stop)
    stopping.start()
    bench.runner.gate.set()
    stopping.join(10)
    assert bench.outcomes.get(timeout=10).step_id == 1


def test_a_newer_epoch_empties_the_slots_and_drops_older_plans(bench) -> None:
    bench.put(1, 1)
    bench.put(2, 1)
    bench.put(1, 2)
    assert steps(bench.fence()) == [(1, 1), (2, 1)]
    assert bench.runner.num_resets == 2


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PlanRejected("no such block"), FailureKind.PLAN_REJECTED, "step 2: no such block"),
        (RuntimeError("shapes"), FailureKind.INTERNAL, "step 2: RuntimeError: shapes"),
    ],
)
def test_a_failure_ends_its_epoch_only(error, kind, message, bench) -> None:
    bench.runner.errors[2] = error
    for step_id in (1, 2, 3):
        bench.put(1, step_id)
    outcomes = bench.fence()
    assert steps(outcomes[:1]) == [(1, 1)]
    assert outcomes[1:] == [Failure(kind, message)]
    del bench.runner.errors[2]
    bench.put(2, 1)
    assert steps(bench.fence()) == [(2, 1)]
    assert not bench.lost.is_set()


def test_a_lost_device_ends_the_thread(bench) -> None:
    bench.is_sane = False
    bench.runner.errors[1] = RuntimeError("illegal memory access")
    bench.put(1, 1)
    assert bench.outcomes.get(timeout=10).kind is FailureKind.INTERNAL
    assert bench.lost.wait(10)
    bench.thread.stop()
    assert not bench.thread.is_alive


def test_a_rejected_plan_does_not_question_the_device(bench) -> None:
    bench.is_sane = False
    bench.runner.errors[1] = PlanRejected("no")
    bench.put(1, 1)
    bench.fence()
    assert bench.thread.is_alive
    assert not bench.lost.is_set()


def test_a_thread_that_hangs_is_silent(bench) -> None:
    bench.thread.probe()
    bench.fence()
    assert bench.thread.silent_s() == 0, "idle, and answers"
    bench.runner.gate.clear()
    bench.put(1, 1)
    assert bench.thread.silent_s() == 0, "nobody asks"
    bench.thread.probe()
    before_s = bench.thread.silent_s()
    while bench.thread.silent_s() <= before_s:
        bench.thread.probe()
    bench.runner.gate.set()
    bench.fence()
    assert bench.thread.silent_s() == 0


def test_silence_begins_anew_with_each_step(late) -> None:
    """However many wait behind it, and however long ago somebody asked."""
    late.put(1, 1)
    late.put(1, 2)
    wait_until_launched(late, 2)
    late.thread.probe()
    probed_ns = late.thread._probed_ns
    late.runner.gates[1].set()
    assert late.outcomes.get(timeout=10).step_id == 1
    assert late.thread._probed_ns == probed_ns, "it waits for the second step"
    assert late.thread.silent_s() < (time.monotonic_ns() - probed_ns) * 1e-9


class LateRunner(FakeRunner):
    """Launches at once; a step is finished when its own gate opens, or fails then.

    late_errors  by step id: raised by `finish`
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


@pytest.fixture
def late() -> Iterator[Bench]:
    late = Bench(LateRunner())
    yield late
    for gate in late.runner.gates.values():
        gate.set()
    late.thread.stop()


def wait_until_launched(late: Bench, num_steps: int) -> None:
    while len(late.runner.executed) < num_steps:
        assert late.thread.is_alive


def test_launched_steps_leave_in_order(late) -> None:
    for step_id in (1, 2, 3):
        late.put(1, step_id)
    wait_until_launched(late, 3)
    for step_id in (3, 2):
        late.runner.gates[step_id].set()
    assert late.outcomes.empty()
    late.runner.gates[1].set()
    outcomes = late.fence()
    assert steps(outcomes) == [(1, 1), (1, 2), (1, 3)]
    assert all(outcome.timings.queue_ns > 0 for outcome in outcomes)


def test_an_unfinished_step_is_silent_too(late) -> None:
    late.put(1, 1)
    wait_until_launched(late, 1)
    late.thread.probe()
    before_s = late.thread.silent_s()
    while late.thread.silent_s() <= before_s:
        pass
    late.runner.gates[1].set()
    late.fence()
    assert late.thread.silent_s() == 0


def test_a_late_failure_ends_its_epoch_only(late) -> None:
    late.runner.late_errors[2] = RuntimeError("illegal address")
    for step_id in (1, 2, 3):
        late.put(1, step_id)
    wait_until_launched(late, 3)
    for gate in late.runner.gates.values():
        gate.set()
    outcomes = late.fence()
    assert steps(outcomes[:1]) == [(1, 1)]
    assert outcomes[1:] == [Failure(FailureKind.INTERNAL, "step 2: RuntimeError: illegal address")]
    late.put(1, 4)
    assert late.fence() == []
    assert (1, 4) not in late.runner.executed
    late.runner.late_errors.clear()
    late.put(2, 1)
    assert steps(late.fence()) == [(2, 1)]
    assert not late.lost.is_set()


def test_a_rejected_plan_waits_for_the_results_before_it(late) -> None:
    late.runner.errors[3] = PlanRejected("no such block")
    for step_id in (1, 2, 3, 4):
        late.put(1, step_id)
    wait_until_launched(late, 2)
    assert late.outcomes.empty()
    for gate in late.runner.gates.values():
        gate.set()
    outcomes = late.fence()
    assert steps(outcomes[:2]) == [(1, 1), (1, 2)]
    assert outcomes[2:] == [Failure(FailureKind.PLAN_REJECTED, "step 3: no such block")]


@pytest.mark.parametrize("where", ["errors", "late_errors"])
def test_a_device_lost_late_ends_the_thread(where, late) -> None:
    """At the second step, be it at its launch or afterwards, with the first one still under way."""
    late.is_sane = False
    getattr(late.runner, where)[2] = RuntimeError("gone")
    for step_id in (1, 2):
        late.put(1, step_id)
    wait_until_launched(late, 1)
    assert not late.lost.is_set()
    for gate in late.runner.gates.values():
        gate.set()
    assert steps([late.outcomes.get(timeout=10)]) == [(1, 1)]
    assert late.outcomes.get(timeout=10).kind is FailureKind.INTERNAL
    assert late.lost.wait(10)
    late.thread.stop()
    assert not late.thread.is_alive


def test_stop_finishes_what_was_launched(late) -> None:
    late.put(1, 1)
    wait_until_launched(late, 1)
    opener = threading.Timer(0.05, late.runner.gates[1].set)
    opener.start()
    late.thread.stop()
    assert steps([late.outcomes.get_nowait()]) == [(1, 1)]
    opener.join()


def test_stop_drops_what_was_not_begun(bench) -> None:
    bench.runner.gate.clear()
    for step_id in (1, 2, 3):
        bench.put(1, step_id)
    assert bench.runner.entered.wait(10)
    stopping = threading.Thread(target=bench.thread.stop)
    stopping.start()
    while not bench.thread._is_stopping:
        time.sleep(0.001)
    bench.runner.gate.set()
    stopping.join(10)
    assert steps([bench.outcomes.get_nowait()]) == bench.runner.executed == [(1, 1)]
    assert bench.outcomes.empty()


def test_idle_work_is_done_to_its_end_between_steps() -> None:
    turns: list[int] = []
    done = threading.Event()

    def idle_work() -> Iterator[None]:
        for turn in range(3):
            turns.append(turn)
            yield
        done.set()

    bench = Bench(idle_work=idle_work())
    try:
        assert done.wait(10)
        assert turns == [0, 1, 2]
        bench.put(1, 1)
        assert steps(bench.fence()) == [(1, 1)]
    finally:
        bench.thread.stop()


def test_steps_do_not_wait_for_idle_work() -> None:
    """Steps that come during a turn are the next things that are done, however many turns are left."""
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

    bench = Bench(Recording(), idle_work())
    try:
        assert begun.wait(10)
        for step_id in range(1, 6):
            bench.put(1, step_id)
        go_on.set()
        assert steps(bench.fence()) == [(1, step_id) for step_id in range(1, 6)]
        assert done[:6] == ["turn", *["step"] * 5]
    finally:
        bench.thread.stop()
