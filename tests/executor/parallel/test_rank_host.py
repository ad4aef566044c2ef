"""`quire rank` keeps each of its ranks, and ends if it cannot: it never waits for one that nothing keeps."""

from __future__ import annotations

import socket
import subprocess
import sys
from queue import SimpleQueue
from typing import Any

import pytest

from executor.parallel import rank_host
from executor.parallel.rank_config import RankConfig

CONFIG = RankConfig("127.0.0.1:1", "key", "model")


@pytest.fixture(autouse=True)
def _joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_host, "join", lambda *_: socket.socketpair()[0])
    monkeypatch.setattr(rank_host, "RETRY_S", 0.0)


def kept() -> int:
    """Returns the exit code with which keeping a rank ends."""
    codes: SimpleQueue[int] = SimpleQueue()
    rank_host._keep(CONFIG, b"", codes)
    return codes.get(timeout=0)


def test_a_rank_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [BlockingIOError("no process number is left")]

    def start(*_: Any) -> subprocess.Popen[bytes]:
        if failures:
            raise failures.pop()
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])

    monkeypatch.setattr(rank_host, "start_worker", start)
    assert kept() == rank_host.EXIT_CONFIG


def test_a_bug_ends_the_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def start(*_: Any) -> subprocess.Popen[bytes]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rank_host, "start_worker", start)
    assert kept() == rank_host.EXIT_BUG
    assert "a rank cannot be kept" in caplog.text
