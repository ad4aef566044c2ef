"""Refused calls are counted one by one, and logged at intervals."""

import logging

import pytest

from scheduler.identity.identity import UNAUTHENTICATED
from scheduler.servers.refusals import LOG_INTERVAL_S, Refusals
from scheduler.telemetry.limits import LOG_LINES
from tests.support.scheduler.limits import counted


def test_a_line_for_many_refusals_says_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    now_s = 100.0
    refusals = Refusals(reasons.append, lambda: now_s)
    with caplog.at_level(logging.WARNING), counted(LOG_LINES, 99):
        for _ in range(100):
            refusals.refused(UNAUTHENTICATED, "GET /metrics", "127.0.0.1", "no credentials")
        now_s += LOG_INTERVAL_S
        refusals.refused(UNAUTHENTICATED, "GET /\n" + "x" * 1000, "127.0.0.1", "no credentials")
    assert reasons == [UNAUTHENTICATED] * 101
    first, second = (vars(record) for record in caplog.records)
    assert (first["not_logged_before"], second["not_logged_before"]) == (0, 99)
    assert first["call"] == "GET /metrics"
    assert len(second["call"]) < 150, "long names are cut"
    assert "\n" not in second["call"]
