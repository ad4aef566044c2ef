"""A process under test: what it prints is kept, and it does not outlive the tests."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import psutil

from tests.support.e2e.waiting import WAIT_S
from tests.support.paths import ROOT

_LIFELINE = ROOT / "quire" / "cli" / "lifeline.py"
_MARK = "TESTED_PROCESS"


class ProcessEnded(AssertionError):
    """It ended, or took too long, before it said what was waited for."""


class Process:
    """Starts `command`. Its lines are read as they come, so that it never blocks on a full pipe.

    Start it from a thread that lives as long as it: the kernel kills it when that thread ends (quire/cli/lifeline.py).
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._mark = uuid.uuid4().hex
        self.lines: list[tuple[str, str]] = []
        self._has_news = threading.Condition()
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LIFELINE), str(os.getpid()), *command],
            cwd=ROOT,
            env=os.environ | {_MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, source), daemon=True)
            for stream, source in (("stdout", self._popen.stdout), ("stderr", self._popen.stderr))
            if source is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def return_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def line(self, start: str) -> str:
        """Waits for a line on standard output that starts so. Raises ProcessEnded if none comes."""
        until_s = time.monotonic() + WAIT_S
        with self._has_news:
            while True:
                has_ended = not any(reader.is_alive() for reader in self._readers)
                for stream, line in self.lines:
                    if stream == "stdout" and line.startswith(start):
                        return line
                if has_ended or time.monotonic() > until_s:
                    raise ProcessEnded(f"{self.name} never printed {start!r}\n{self.log()}")
                self._has_news.wait(0.5)

    def log(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def printed(self, stream: str) -> str:
        """All of "stdout" or "stderr" so far."""
        return "\n".join(line for source, line in self.lines if source == stream)

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Waits for its end; returns the exit code. Raises TimeoutExpired."""
        return_code = self._popen.wait(WAIT_S)
        for reader in self._readers:
            reader.join(5.0)
        return return_code

    def family(self) -> list[psutil.Process]:
        """Itself and what it started, as far as it runs: found by a mark in the environment, which is inherited."""
        return [process for process in psutil.process_iter() if _mark(process) == self._mark]

    def kill(self) -> None:
        """Ends it and all that it started, whatever they do. May be called again."""
        until_s = time.monotonic() + WAIT_S
        while (family := self.family()) and time.monotonic() < until_s:
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            time.sleep(0.01)
        self._popen.wait(WAIT_S)

    def _read(self, stream: str, source: IO[str]) -> None:
        with source:
            for line in source:
                with self._has_news:
                    self.lines.append((stream, line.rstrip("\n")))
                    self._has_news.notify_all()
        with self._has_news:
            self._has_news.notify_all()


def is_running(pid: int) -> bool:
    """A zombie, whose parent has yet to take notice of its end, does not run."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _mark(process: psutil.Process) -> str:
    """Empty for processes that have none, do not run, or are not ours to look at."""
    try:
        return str(process.environ().get(_MARK, "")) if is_running(process.pid) else ""
    except psutil.Error:
        return ""
