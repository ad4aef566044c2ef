"""The processes that work on clients' texts."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from scheduler.text.workers import FOLDERS, WORKER

if TYPE_CHECKING:
    from pathlib import Path

LOADED_SLOWLY = """
import sys
print("loading", flush=True)
sys.stdin.readline()
def main():
    print("served")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "closed terminal"])
def test_a_signal_of_the_terminal_does_not_end_a_worker_that_loads(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(LOADED_SLOWLY)
    command = [sys.executable, "-I", "-c", WORKER, "slow_module", str(tmp_path), FOLDERS[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "loading\n"
        worker.send_signal(number)
        worker.stdin.write("\n")
        worker.stdin.close()
        assert worker.stdout.read() == "served\n"
    assert worker.returncode == 0
