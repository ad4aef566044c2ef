"""A process under test, whose output is kept and which does not outlive the tests."""

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import psutil

from quire.command import lifeline
from tests.support.e2e.waiting import WAIT_S
from tests.support.paths import ROOT

_MARK = "TESTED_PROCESS"


class ProcessEnded(AssertionError):
    """The process ended, or took too long, before it printed the expected line."""


class Process:
    """Starts `command` and reads its lines as they come, so that it never blocks on a full pipe.

    The thread that starts it must live as long as the process: the kernel kills the process when that thread ends
    (quire/lifeline.py).
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._mark = uuid.uuid4().hex
        self.lines: list[tuple[str, str]] = []
        self._has_news = threading.Condition()
        self._popen = subprocess.Popen(
            [*lifeline(), *command],
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
        """The exit code, or None while the process runs."""
        return self._popen.poll()

    def line(self, start: str) -> str:
        """Waits for a line on standard output that begins with `start`. Raises ProcessEnded if none comes."""
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
        """Returns everything that was printed so far."""
        return "\n".join(line for _, line in self.lines)

    def printed(self, stream: str) -> str:
        """Returns everything that was printed so far on "stdout" or "stderr"."""
        return "\n".join(line for source, line in self.lines if source == stream)

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Waits for the process to end; returns the exit code. Raises TimeoutExpired."""
        return_code = self._popen.wait(WAIT_S)
        for reader in self._readers:
            reader.join(5.0)
        return return_code

    def family(self) -> list[psutil.Process]:
        """Returns this process and its descendants that run, found by a variable in their environment."""
        return [process for process in psutil.process_iter() if _mark(process) == self._mark]

    def kill(self) -> None:
        """Kills the process and all its descendants. It may be called again."""
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
    """Returns true if the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _mark(process: psutil.Process) -> str:
    """Returns the mark of a process; empty if it has none, does not run, or cannot be inspected."""
    try:
        return str(process.environ().get(_MARK, "")) if is_running(process.pid) else ""
    except psutil.Error:
        return ""
