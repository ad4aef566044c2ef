"""The share of time without a plan."""

from __future__ import annotations

import math

import pytest

from executor.metrics import IdleRatio


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 1000.0

    monkeypatch.setattr("time.monotonic", lambda: Clock.now_s)
    return Clock


def test_idle_until_the_first_step(clock) -> None:
    assert IdleRatio().current() == 1.0


def test_the_mix_of_the_last_seconds(clock) -> None:
    ratio = IdleRatio()
    for _ in range(1000):
        clock.now_s += 0.1
        ratio.add(idle_s=0.025, busy_s=0.075)
    assert ratio.current() == pytest.approx(0.25, abs=0.01)
    clock.now_s += 10.0
    assert ratio.current() == pytest.approx(1 - 0.75 / math.e, abs=0.01)
    clock.now_s += 1000.0
    assert ratio.current() == pytest.approx(1.0)


def test_one_long_step(clock) -> None:
    ratio = IdleRatio()
    ratio.add(idle_s=0.0, busy_s=1000.0)
    assert ratio.current() == pytest.approx(0.0)
