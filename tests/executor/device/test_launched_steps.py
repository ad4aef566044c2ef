"""The device thread with a runner that launches steps and finishes them later."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from executor.device.work import Failure, FailureKind
from executor.errors import PlanRejected
from tests.support.executor.device_harness import Harness, LateRunner, steps

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def late() -> Iterator[Harness]:
    late = Harness(LateRunner())
    yield late
    for gate in late.runner.gates.values():
        gate.set()
    late.thread.stop()


def wait_until_launched(late: Harness, num_steps: int) -> None:
    while len(late.runner.executed) < num_steps:
        assert late.thread.is_alive


def test_silence_restarts_with_each_step(late) -> None:
    """The number of waiting steps and the age of the probe do not matter."""
    late.put(1, 1)
    late.put(1, 2)
    wait_until_launched(late, 2)
    late.thread.probe()
    probed_ns = late.thread._probed_ns
    late.runner.gates[1].set()
    assert late.outcomes.get(timeout=10).step_id == 1
    assert late.thread._probed_ns == probed_ns, "the probe waits for the second step"
    assert late.thread.silent_s() < (time.monotonic_ns() - probed_ns) * 1e-9


def test_launched_steps_are_delivered_in_order(late) -> None:
    for step_id in (1, 2, 3):
        late.put(1, step_id)
    wait_until_launched(late, 3)
    for step_id in (3, 2):
        late.runner.gates[step_id].set()
    assert late.outcomes.empty()
    late.runner.gates[1].set()
    outcomes = late.flush()
    assert steps(outcomes) == [(1, 1), (1, 2), (1, 3)]
    assert all(outcome.timings.queue_ns > 0 for outcome in outcomes)


def test_an_unfinished_step_is_silent(late) -> None:
    late.put(1, 1)
    wait_until_launched(late, 1)
    late.thread.probe()
    before_s = late.thread.silent_s()
    while late.thread.silent_s() <= before_s:
        pass
    late.runner.gates[1].set()
    late.flush()
    assert late.thread.silent_s() == 0


def test_a_late_failure_ends_its_epoch_only(late) -> None:
    late.runner.late_errors[2] = RuntimeError("illegal address")
    for step_id in (1, 2, 3):
        late.put(1, step_id)
    wait_until_launched(late, 3)
    for gate in late.runner.gates.values():
        gate.set()
    outcomes = late.flush()
    assert steps(outcomes[:1]) == [(1, 1)]
    assert outcomes[1:] == [Failure(FailureKind.INTERNAL, "step 2: RuntimeError: illegal address")]
    late.put(1, 4)
    assert late.flush() == []
    assert (1, 4) not in late.runner.executed
    late.runner.late_errors.clear()
    late.put(2, 1)
    assert steps(late.flush()) == [(2, 1)]
    assert not late.lost.is_set()


def test_a_rejected_plan_waits_for_the_results_before_it(late) -> None:
    late.runner.errors[3] = PlanRejected("no such block")
    for step_id in (1, 2, 3, 4):
        late.put(1, step_id)
    wait_until_launched(late, 2)
    assert late.outcomes.empty()
    for gate in late.runner.gates.values():
        gate.set()
    outcomes = late.flush()
    assert steps(outcomes[:2]) == [(1, 1), (1, 2)]
    assert outcomes[2:] == [Failure(FailureKind.PLAN_REJECTED, "step 3: no such block")]


@pytest.mark.parametrize("where", ["errors", "late_errors"])
def test_a_device_lost_late_ends_the_thread(where, late) -> None:
    """The second step fails at its launch or afterwards, while the first one is still under way."""
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


def test_stop_finishes_launched_steps(late) -> None:
    late.put(1, 1)
    wait_until_launched(late, 1)
    opener = threading.Timer(0.05, late.runner.gates[1].set)
    opener.start()
    late.thread.stop()
    assert steps([late.outcomes.get_nowait()]) == [(1, 1)]
    opener.join()


def test_the_device_is_busy_from_the_first_launch_to_the_last_end(late) -> None:
    assert late.thread.busy_since_s() is None
    late.put(1, 1)
    wait_until_launched(late, 1)
    since_s = late.thread.busy_since_s()
    assert since_s is not None
    late.put(1, 2)
    wait_until_launched(late, 2)
    late.runner.late_errors[1] = RuntimeError("lost")
    late.runner.gates[1].set()
    late.outcomes.get(timeout=10)
    assert late.thread.busy_since_s() == since_s, "the second step is under way"
    late.runner.gates[2].set()
    late.flush()
    assert late.thread.busy_since_s() is None
