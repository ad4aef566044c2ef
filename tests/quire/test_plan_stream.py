"""Two ends of the plan stream agree if they have a version in common."""

from __future__ import annotations

import pytest

from quire import plan_stream
from quire.plan_stream import speaks_with, spoken


@pytest.mark.parametrize(
    ("version", "least", "agree"),
    [
        (5, 5, True),
        (5, 0, True),
        (4, 4, True),
        (3, 2, True),
        (2, 2, False),
        (0, 0, False),
        (6, 5, True),
        (9, 1, True),
        (6, 6, False),
        (6, 0, False),
    ],
)
def test_ends_agree_on_the_lower_version_if_both_speak_it(version, least, agree, monkeypatch) -> None:
    """This end speaks 3 to 5. A peer that names no least version speaks its own only."""
    monkeypatch.setattr(plan_stream, "PROTOCOL_VERSION", 5)
    monkeypatch.setattr(plan_stream, "LEAST_PROTOCOL_VERSION", 3)
    assert speaks_with(version, least) is agree


def test_messages_name_versions() -> None:
    assert [spoken(0, 0), spoken(3, 0), spoken(3, 3), spoken(4, 2)] == [
        "version 1 or older",
        "version 3",
        "version 3",
        "versions 2 to 4",
    ]
