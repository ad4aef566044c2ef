"""A client whose deadline has come is told from one that leaves, though neither waits for the core."""

from __future__ import annotations

import pytest

from scheduler.core import FinishReason
from scheduler.requests.leaving import code_of_leaving, reason_of_leaving


@pytest.mark.parametrize(
    ("timeout_s", "stays_s", "reason"),
    [
        (None, 1e6, FinishReason.CANCELLED),
        (30.0, 0.5, FinishReason.CANCELLED),
        (30.0, 29.0, FinishReason.CANCELLED),
        (30.0, 29.7, FinishReason.DEADLINE),  # gRPC has rounded 29.7 s up
        (30.0, 30.0, FinishReason.DEADLINE),
        (30.0, 31.0, FinishReason.DEADLINE),
        (0.05, 0.0, FinishReason.DEADLINE),
    ],
)
def test_calls_that_end_at_about_their_deadline_are_late(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, stays_s: float, reason: FinishReason
) -> None:
    arrival_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: arrival_s + stays_s)
    deadline_s = None if timeout_s is None else arrival_s + timeout_s
    assert reason_of_leaving(deadline_s, arrival_s) is reason
    assert code_of_leaving(deadline_s, arrival_s) == (
        "deadline_exceeded" if reason is FinishReason.DEADLINE else "cancelled"
    )
