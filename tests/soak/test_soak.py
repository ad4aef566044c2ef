"""A short soak, and the arithmetic of its report."""

import json

import pytest

from tests.soak.__main__ import seconds
from tests.soak.faults import NAMES
from tests.soak.report import leaks, tracebacks
from tests.soak.resources import Sample, longest_life, slope
from tests.soak.soak import Settings, soak


def sample(time_s: float, rss: int, pid: int = 1) -> Sample:
    return Sample(time_s, "scheduler", pid, rss, 10, 5)


def test_the_slope_is_that_of_the_last_half() -> None:
    samples = [sample(time_s, 500 if time_s < 10 else 100 + 3 * time_s) for time_s in range(20)]
    assert slope(samples) == pytest.approx(3.0)
    assert slope(samples[:1]) == 0.0


def test_the_process_that_ran_longest_is_observed() -> None:
    samples = [sample(0, 1), *(sample(time_s, 2, pid=2) for time_s in range(3)), sample(9, 3, pid=3)]
    assert {each.pid for each in longest_life(samples, "scheduler")} == {2}
    assert longest_life(samples, "executor") == []


@pytest.mark.parametrize(
    ("changed", "num_leaks"),
    [
        ({}, 0),
        ({"descriptors at the end": 19}, 1),
        ({"MiB an hour": 31.0}, 1),
    ],
)
def test_leaks_are_reported(changed: dict[str, float], num_leaks: int) -> None:
    row = {
        "MiB at the end": 100.0,
        "MiB an hour": 3.0,
        "descriptors at the start": 10,
        "descriptors at the end": 12,
    }
    assert len(leaks({"scheduler": row | changed})) == num_leaks


def test_exceptions_in_the_log_are_reported() -> None:
    log = "ready\nscheduler | error: a step failed\nscheduler |     Traceback (most recent call last):\n  File x\nready"
    assert tracebacks(log) == ["an exception: scheduler | error: a step failed"]
    assert tracebacks("ready") == []


@pytest.mark.parametrize(("text", "expected"), [("90", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("20s", 20.0)])
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.exhaustive
async def test_a_short_soak_leaves_nothing_wrong() -> None:
    """Among the faults that the seed draws are kills of both services, an upgrade, and clients that are stalled."""
    report = await soak(Settings(duration_s=12, seed=435, faults=NAMES, pause_s=2, num_clients=8))
    assert report.problems == []
    assert report.num_tokens > 0
    assert report.faults
    assert report.left == {"running requests": 0, "waiting requests": 0, "active blocks": 0, "tasks": 0}
    assert json.loads(json.dumps(report.as_json()))["seed"] == 435
    assert str(report).endswith("passed")
