"""Attackers run at the lowest priority."""

import os
from pathlib import Path

import pytest

from bench.attacks.attacker import take_lowest_priority


def test_the_session_gets_the_lowest_priority_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux shares the processor among sessions first: the niceness of a process alone changes nothing between them."""
    niceness: list[int] = []
    monkeypatch.setattr(os, "nice", niceness.append)
    autogroup = tmp_path / "autogroup"
    autogroup.write_text("/autogroup-7 nice 0\n")
    take_lowest_priority(autogroup)
    assert niceness == [19]
    assert autogroup.read_text() == "19"


def test_a_system_without_autogroups_has_the_niceness_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    niceness: list[int] = []
    monkeypatch.setattr(os, "nice", niceness.append)
    take_lowest_priority(tmp_path / "missing" / "autogroup")
    assert niceness == [19]
