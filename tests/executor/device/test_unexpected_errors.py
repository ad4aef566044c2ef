"""An error that nothing expects ends neither thread of the device: it fails what it touches, and is logged."""

from __future__ import annotations

import errno
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from executor.device.work import EndOfPlans, Failure, FailureKind, LivenessProbe, Marker, Step
from executor.plans.plan import StepPlan
from tests.support.executor.device_harness import Harness, LateRunner, steps
from tests.support.executor.fake_runner import FakeRunner
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.device.work import Outcome

ERRORS = [MemoryError(), OSError(errno.EMFILE, "too many open files"), KeyError("unforeseen")]


class Broken:
    """A function that raises an error until `error` is None."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def __call__(self, *arguments: object) -> None:
        if self.error is not None:
            raise self.error


def check_serving(harness: Harness, epoch: int) -> None:
    """Both threads live, and a step of a new epoch is computed and delivered."""
    harness.put(epoch, 1)
    assert steps(harness.flush()) == [(epoch, 1)]
    assert harness.thread.is_alive
    assert not harness.lost.is_set()
    harness.thread.stop()


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_in_a_step_ends_its_epoch(
    error: Exception, caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    harness = Harness()
    harness.runner.errors[1] = error
    harness.put(1, 1)
    message = f"step 1: {type(error).__name__}: {error}"
    assert harness.flush() == [Failure(FailureKind.INTERNAL, message)]
    assert "Traceback" in caplog.text
    harness.runner.errors.clear()
    check_serving(harness, 2)
    assert counted() == {"step": 1}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_while_the_slots_are_emptied_ends_the_epoch(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    counted: Callable[[], dict[str, int]],
) -> None:
    harness = Harness()
    with monkeypatch.context() as patch:
        patch.setattr(FakeRunner, "reset", Broken(error))
        harness.put(1, 1)
        assert [outcome.kind for outcome in harness.flush()] == [FailureKind.INTERNAL]
    assert "Traceback" in caplog.text
    check_serving(harness, 2)
    assert counted() == {"step": 1}


def test_an_error_while_the_thread_is_prepared_is_logged(
    caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    """A container may forbid to change priorities."""

    class Unprepared(list[object]):
        def append(self, item: object) -> None:
            raise PermissionError(errno.EPERM, "not permitted")

    class UnpreparedHarness(Harness):
        @property
        def prepared_on(self) -> list[object]:  # type: ignore[override]
            return Unprepared()

        @prepared_on.setter
        def prepared_on(self, value: object) -> None:
            pass

    check_serving(UnpreparedHarness(), 1)
    assert "could not be prepared" in caplog.text
    assert counted() == {"preparation": 1}


def test_an_error_in_idle_work_ends_only_the_idle_work(
    caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    def capture() -> Iterator[None]:
        yield
        raise MemoryError

    harness = Harness(idle_work=capture())
    wait_until(lambda: "idle work failed" in caplog.text)
    check_serving(harness, 1)
    assert counted() == {"idle_work": 1}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_in_the_delivery_of_an_outcome_loses_that_outcome(
    error: Exception, caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    harness = Harness()
    harness.thread.put(Step(StepPlan(1, 1), 0, Broken(error)))
    harness.thread.put(Marker(EndOfPlans(), Broken(error)))
    harness.thread.put(LivenessProbe(Broken(error)))
    wait_until(lambda: caplog.text.count("could not be delivered") == 3)
    check_serving(harness, 2)
    assert counted() == {"delivery": 3}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_in_the_check_of_the_device_is_no_answer(
    error: Exception, monkeypatch: pytest.MonkeyPatch, counted: Callable[[], dict[str, int]]
) -> None:
    """Memory can be short for the check too. The next step fails, or does not."""
    harness = Harness()
    harness.runner.errors[1] = RuntimeError("shapes")
    monkeypatch.setattr(harness.thread, "_device_is_sane", Broken(error))
    harness.put(1, 1)
    assert [outcome.kind for outcome in harness.flush()] == [FailureKind.INTERNAL]
    harness.runner.errors.clear()
    check_serving(harness, 2)
    assert counted() == {"step": 1, "between_steps": 1}


def test_a_late_step_whose_result_cannot_be_made_fails(counted: Callable[[], dict[str, int]]) -> None:
    harness = Harness(LateRunner())
    for gate in harness.runner.gates.values():  # type: ignore[attr-defined]
        gate.set()
    broken, outcomes = Broken(MemoryError()), []

    def deliver(broken: Broken, outcome: Outcome) -> None:
        if not isinstance(outcome, Failure):
            broken()
        outcomes.append(outcome)

    harness.thread.put(Step(StepPlan(1, 1), 0, partial(deliver, broken)))
    wait_until(lambda: len(outcomes) == 1)
    assert outcomes[0].kind is FailureKind.INTERNAL
    check_serving(harness, 2)
    assert counted() == {"step": 1}


def test_a_jump_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    for jump_s in (-1e9, 1e9):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.7e9 + jump_s)
        harness.thread.probe()
        assert harness.flush() == []
        assert harness.thread.silent_s() < 60
    check_serving(harness, 1)
