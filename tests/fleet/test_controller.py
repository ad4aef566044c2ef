"""The loop of the controller over a fake backend."""

import errno
import logging
import os
import threading
import time
from typing import Any

import pytest

from fleet import controller
from fleet.autoscale import GROW_AFTER_S, SHRINK_AFTER_S
from fleet.controller import Controller
from fleet.parts import Load, Part, Role, State
from fleet.restarts import HEALTHY_S, MAX_DELAY_S
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, Wanted
from tests.support.fleet.world import FakeBackend


class World:
    def __init__(self, replicas: int = 2, **fields: Any) -> None:
        self.backend = FakeBackend()
        self.saved: list[Wanted] = []
        self.settings = FleetSettings("test", "local", "model", **fields)
        self._control(Wanted.of(replicas))

    def ticks(self, number: int = 1, step_s: float = 0.5) -> bool:
        is_down = False
        for _ in range(number):
            self.backend.now_s += step_s
            is_down = self.controller.tick()
        return is_down

    def restarted(self) -> None:
        """Replaces the controller, as after its death: it knows what was saved."""
        self._control(self.saved[-1] if self.saved else Wanted.of(2))

    def _control(self, wanted: Wanted) -> None:
        self.controller = Controller(self.settings, wanted, self.backend, self.saved.append, lambda: self.backend.now_s)


EVERYTHING = ["executor-0", "executor-1", "gateway-0", "scheduler-0", "scheduler-1"]


def test_a_fleet_comes_up_and_rests() -> None:
    world = World()
    world.ticks(6)
    assert world.backend.parts() == EVERYTHING
    done = list(world.backend.log)
    world.ticks(20)
    assert world.backend.log == done


def test_a_question_waits_until_a_new_controller_knows_its_parts() -> None:
    world = World()
    world.ticks(6)
    world.restarted()
    reports: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: reports.append(world.controller.call("status", {})), daemon=True)
    asking.start()
    world.ticks()
    asking.join(60)
    assert [each["part"] for each in reports[0]["parts"]] == EVERYTHING


def test_a_controller_that_cannot_watch_the_fleet_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "LOOK_TIMEOUT_S", 0.01)
    with pytest.raises(FleetError, match="cannot watch the fleet"):
        World().controller.call("status", {})


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_part_that_dies_is_started_again_and_nothing_else(name: str) -> None:
    world = World()
    world.ticks(6)
    del world.backend.log[:]
    world.backend.end(world.backend.running(Part.parse(name))[0].incarnation)
    world.ticks(6)
    assert world.backend.parts() == EVERYTHING
    assert world.backend.verbs("start") == [name]
    assert not world.backend.verbs("kill")


def test_a_hung_part_is_killed_and_started_again() -> None:
    world = World()
    world.ticks(6)
    world.backend.set_state(Part(Role.EXECUTOR, 1), State.HUNG)
    world.ticks(6)
    assert world.backend.verbs("kill") == ["executor-1"]
    assert world.backend.parts() == EVERYTHING


def test_a_scheduler_whose_executor_is_away_waits_and_is_not_ready() -> None:
    world = World(1)
    world.ticks(6)
    scheduler = Part(Role.SCHEDULER, 0)

    def state() -> str:
        world.ticks()
        return {each["part"]: each["state"] for each in world.controller.call("status", {})["parts"]}[str(scheduler)]

    world.backend.loads[scheduler] = Load(0, 0.0, 0, 2, has_executor=False)
    assert state() == "waiting"
    world.backend.loads[scheduler] = Load(0, 0.0, 0, 2)
    assert state() == "ready"
    del world.backend.loads[scheduler]
    assert state() == "ready", "a scheduler that is too busy to answer in time may serve"


def test_an_executor_that_dies_at_once_is_started_less_and_less_often() -> None:
    world = World(1)
    world.backend.ready_in = 10**9
    for _ in range(2400):
        world.ticks(1, 0.05)
        for status in world.backend.running(Part(Role.EXECUTOR, 0)):
            world.backend.end(status.incarnation)
    num_starts = world.backend.verbs("start").count("executor-0")
    assert 8 <= num_starts <= 8 + 120 / MAX_DELAY_S
    assert world.controller.call("status", {})["parts"][0]["num_ends"] >= num_starts - 1


def set_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Sets the clock of the machine, forward or back."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + by_s)


def test_a_part_is_started_again_soon_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1)
    world.ticks(6)
    world.backend.end(world.backend.running(Part(Role.EXECUTOR, 0))[0].incarnation)
    world.controller.tick()  # it pauses before the next start
    set_clock(monkeypatch, -3600.0)
    world.ticks(int(2 * MAX_DELAY_S) + 6)
    assert world.backend.parts() == ["executor-0", "gateway-0", "scheduler-0"]


def test_all_ends_are_counted() -> None:
    world = World(1)
    for _ in range(3):
        world.ticks(int(HEALTHY_S) * 2 + 10)
        world.backend.end(world.backend.running(Part(Role.EXECUTOR, 0))[0].incarnation)
    world.ticks(6)
    ends = {each["part"]: each["num_ends"] for each in world.controller.call("status", {})["parts"]}
    assert ends == {"executor-0": 3, "gateway-0": 0, "scheduler-0": 0}


def test_a_new_controller_goes_on_where_the_last_one_ended() -> None:
    world = World()
    world.ticks(6)
    world.controller.call("scale", {"replicas": 3})
    world.restarted()
    world.ticks(6)
    assert world.backend.parts() == sorted([*EVERYTHING, "executor-2", "scheduler-2"])
    del world.backend.log[:]
    world.restarted()
    world.ticks(6)
    assert world.backend.log == [], "parts that run are left alone"


def test_a_replica_that_leaves_drains_and_its_number_is_free_again() -> None:
    world = World()
    world.ticks(6)
    report = world.controller.call("drain", {"replica": 0})
    assert report["wanted"]["draining"].keys() == {"0"}
    world.ticks(8)
    assert world.backend.parts() == ["executor-1", "gateway-0", "scheduler-1"]
    assert world.backend.log[-3:] == [
        ("address", Part(Role.GATEWAY, 0)),
        ("drain", Part(Role.SCHEDULER, 0)),
        ("kill", Part(Role.EXECUTOR, 0)),
    ]
    assert not world.controller.call("status", {})["wanted"]["draining"]
    world.controller.call("scale", {"replicas": 2})
    world.ticks(6)
    assert world.backend.parts() == EVERYTHING


@pytest.mark.parametrize("verb", ["drain", "down"])
def test_a_clock_that_was_set_forward_cuts_nothing_short(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.ticks(6)
    world.backend.ends_when_drained = False  # its streams are long
    world.controller.call(verb, {"replica": 0, "timeout_s": 60})
    world.ticks(6)
    set_clock(monkeypatch, 3600.0)
    world.ticks(60)
    assert not world.backend.verbs("kill")
    world.ticks(60)
    assert world.backend.verbs("kill"), "its own time has passed"


def test_the_fleet_goes_down_and_the_controller_ends() -> None:
    world = World()
    world.ticks(6)
    world.controller.call("down", {"timeout_s": 60})
    assert not world.ticks()
    assert world.ticks(8)
    assert world.backend.parts() == []
    assert world.backend.verbs("drain") == ["gateway-0", "scheduler-0", "scheduler-1"]
    assert world.backend.verbs("kill") == ["executor-0", "executor-1"]


@pytest.mark.parametrize("verb", ["start", "watch", "address", "drain", "kill"])
def test_a_verb_that_fails_is_tried_again(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.backend.refuses = {verb}
    with caplog.at_level(logging.ERROR, "fleet.controller"):
        world.ticks(6)
        world.controller.call("scale", {"replicas": 1})
        world.ticks(6)
    world.backend.refuses = set()
    world.ticks(12)
    assert world.backend.parts() == ["executor-0", "gateway-0", "scheduler-0"]


def test_a_part_that_cannot_be_started_says_why_and_is_tried_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another program can take the port of a gateway."""
    world = World(1)
    world.ticks(6)
    gateway = Part(Role.GATEWAY, 0)

    def shown() -> dict[str, Any]:
        (row,) = (each for each in world.controller.call("status", {})["parts"] if each["part"] == str(gateway))
        return {name: row[name] for name in ("state", "last_line", "is_wanted")}

    world.backend.end(world.backend.running(gateway)[0].incarnation)
    world.backend.refuses = {"start"}
    with caplog.at_level(logging.ERROR, "fleet.controller"):
        world.ticks(240)
    problem = {"state": "ended", "last_line": "start does not work", "is_wanted": True}
    assert shown() == problem
    assert 5 <= len(caplog.records) <= 8 + 120 / MAX_DELAY_S
    world.backend.incarnations = {
        name: each for name, each in world.backend.incarnations.items() if each.part != gateway
    }
    world.restarted()
    world.ticks(6)
    assert shown() == problem, "it has never been there"
    world.backend.refuses = set()
    world.ticks(20)
    assert shown() == {"state": "ready", "last_line": "", "is_wanted": True}


@pytest.mark.parametrize(
    ("verb", "arguments", "problem"),
    [("scale", {"replicas": 0}, "1 to"), ("drain", {"replica": 9}, "no replica 9"), ("explode", {}, "no command")],
)
def test_a_wrong_command_changes_nothing(verb: str, arguments: dict[str, int], problem: str) -> None:
    world = World()
    with pytest.raises(FleetError, match=problem):
        world.controller.call(verb, arguments)
    assert not world.saved


# --- scaling by load ------------------------------------------------------------------------------------------------


def test_the_fleet_follows_its_load() -> None:
    world = World(1, target_ttft_ms=1000.0, max_replicas=4)
    world.ticks(6)
    scheduler = Part(Role.SCHEDULER, 0)
    for second in range(2 * int(GROW_AFTER_S) + 4):
        world.backend.loads[scheduler] = Load(4000, 0.5, 1000 * second, 8)  # four seconds of work wait
        world.ticks()
    assert len(world.controller.call("status", {})["wanted"]["serving"]) == 2, "one step, until the new ones serve"
    for part in list(world.backend.loads):
        world.backend.loads[part] = Load(0, 0.0, 0, 0)
    world.ticks(8)
    world.backend.loads |= {Part(Role.SCHEDULER, index): Load(0, 0.0, 0, 0) for index in range(4)}
    world.ticks(int(2 * SHRINK_AFTER_S) - 20)
    assert len(world.controller.call("status", {})["wanted"]["serving"]) == 2
    world.ticks(60)
    assert world.backend.parts() == ["executor-0", "gateway-0", "scheduler-0"]


def test_a_new_controller_does_not_shrink_a_fleet_that_needs_all_its_replicas() -> None:
    """Nothing was looked at before its first look, however long the machine has run."""
    world = World(2, target_ttft_ms=1000.0, max_replicas=2)
    world.backend.now_s = 1e7
    world.ticks(6)
    world.restarted()
    for second in range(2 * int(SHRINK_AFTER_S) + 60):
        queued_tokens = 10 if second < 40 else 0
        for index in range(2):  # each computes 1,000 tokens a second
            world.backend.loads[Part(Role.SCHEDULER, index)] = Load(queued_tokens, 0.0, 500 * second, 1)
        world.ticks()
    assert len(world.controller.call("status", {})["wanted"]["serving"]) == 2


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_neither_grows_a_fleet_nor_keeps_it_small(
    set_by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour that did not pass is no hour in which the queue was computed."""
    world = World(1, target_ttft_ms=1000.0, max_replicas=4)
    world.ticks(6)
    computed, scheduler = 0, Part(Role.SCHEDULER, 0)

    def look(queued_tokens: int, number: int) -> int:
        nonlocal computed
        for _ in range(number):
            computed += 500  # 1,000 a second
            world.backend.loads[scheduler] = Load(queued_tokens, 0.1, computed, 8)
            world.ticks()
        return len(world.controller.call("status", {})["wanted"]["serving"])

    assert look(500, 60) == 1
    set_clock(monkeypatch, set_by_s)
    assert look(500, 20) == 1
    assert look(4000, 1) == 1
    set_clock(monkeypatch, set_by_s)
    assert look(4000, 2 * int(GROW_AFTER_S)) == 2


def test_a_fleet_whose_disk_is_full_stays_as_it_is_and_can_be_ended(caplog: pytest.LogCaptureFixture) -> None:
    world = World(target_ttft_ms=1000.0, max_replicas=4)
    world.ticks(6)

    def save(wanted: Wanted) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.controller._save = save
    for verb, arguments in (("scale", {"replicas": 3}), ("drain", {"replica": 0})):
        with pytest.raises(FleetError, match="cannot be kept: No space left"):
            world.controller.call(verb, arguments)
    for second in range(2 * int(GROW_AFTER_S) + 4):  # it would grow
        world.backend.loads = {Part(Role.SCHEDULER, index): Load(4000, 0.5, 1000 * second, 8) for index in range(2)}
        world.ticks()
    assert world.backend.parts() == EVERYTHING
    assert "cannot be kept" in caplog.text
    world.controller.call("down", {"timeout_s": 0})
    assert world.ticks(20)
    assert world.backend.parts() == []
