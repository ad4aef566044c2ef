"""A child process: starts it, passes on its output, and ends it.

No child outlives its parent: each runs behind `lifeline`, so the kernel kills it however this process ends. Each child
leads its own session, so a Ctrl-C in the terminal does not reach it.
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from quire.command import lifeline

_ENVIRONMENT = {"GRPC_VERBOSITY": "ERROR"}
"""Otherwise gRPC writes a line for each failed handshake. It reads this variable when it is imported."""

_MAX_LINE_BYTES = 1 << 16

LogSink: TypeAlias = Callable[[str, str], None]
"""Called with the name of a child and a line of its output, or with "supervisor" and a line about a child.

The function must not block or raise: a supervisor that waits for the reader of the log cannot restart a child.
"""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The description of a process to keep running.

    name     name of the child in messages
    grace_s  maximum time to end after SIGTERM; after it the child is killed
    without  variables of this process's environment that the child does not get
    """

    name: str
    command: tuple[str, ...]
    grace_s: float = 30.0
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildExit:
    """The end of a child.

    return_code  as in subprocess: negative is the signal that killed it; None: the system could not start a process
    """

    name: str
    return_code: int | None
    last_line: str

    @property
    def ended_well(self) -> bool:
        """True if it ended normally after SIGTERM: with status 0, or by that signal before it could handle it."""
        return self.return_code in (0, -signal.SIGTERM)

    @property
    def exit_code(self) -> int:
        """Exit code for a supervisor that cannot continue: never 0, and 128 + n after signal n."""
        if self.return_code is None:
            return 1
        if self.return_code < 0:
            return 128 - self.return_code
        return self.return_code or 1

    def __str__(self) -> str:
        if self.return_code is None:
            return f"{self.name} could not be started"
        if self.return_code < 0:
            number = -self.return_code  # signals of real time have no name
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"{self.name} was killed by {name}"
        return f"{self.name} exited with status {self.return_code}"


class Child:
    """A child, which has at most one process at a time."""

    def __init__(self, spec: ChildSpec, log: LogSink) -> None:
        self.name = spec.name
        self.grace_s = spec.grace_s
        self._command = spec.command
        self._without = spec.without
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=1)
        self._stopping = asyncio.Event()
        self._has_said_ready = False
        self._has_sigterm = False
        self.num_lines = 0
        """Lines that its processes have printed."""
        self.last_exit: ChildExit | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def has_said_ready(self) -> bool:
        return self._has_said_ready and self.pid is not None

    async def start(self) -> None:
        """Starts a process. If that fails, `wait` reports it as an end of the process: a later start may succeed."""
        self._last_lines.clear()
        self._has_said_ready = False
        self._has_sigterm = False
        self._process = None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *lifeline(),
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=_ENVIRONMENT | {name: value for name, value in os.environ.items() if name not in self._without},
            )
        except OSError as error:
            self._emit(str(error).encode())
            return
        if self.is_stopping:  # terminate() was called while the process started
            self.send(signal.SIGTERM)

    async def wait(self) -> ChildExit:
        """Passes on the output until the process ends; returns how it ended."""
        process = self._process
        if process is None or process.stdout is None:
            return ChildExit(self.name, None, self._last_line())
        output = asyncio.create_task(self._pump(process.stdout))
        return_code = await process.wait()
        # Waits for the rest of the output, but not for long: a grandchild can keep the pipe open.
        await asyncio.wait({output}, timeout=1.0)
        output.cancel()
        self.last_exit = ChildExit(self.name, return_code, self._last_line())
        return self.last_exit

    async def stopping_within(self, seconds: float) -> bool:
        """Waits for at most this time. Returns True as soon as the child is told to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self.is_stopping

    def terminate(self) -> None:
        """Sends SIGTERM if a process runs and `end` has not sent it, and prevents further restarts."""
        self._stopping.set()
        if not self._has_sigterm:  # a second one makes a scheduler break off its streams
            self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to all processes that it started."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, number: signal.Signals, within_s: float) -> bool:
        """Sends a signal to the process, and SIGKILL if it still runs after this time; then it may be started again.

        Returns False if it had to be killed.
        """
        process = self._process
        if process is None or self.pid is None:
            return True
        self.send(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await process.wait()
        if process is not self._process or self.pid is None:
            return True
        self.kill()
        return False

    def send(self, number: signal.Signals) -> None:
        """Signals the process itself, if there is one, because the methods of asyncio's process poll it first.

        Where a thread waits for the process (Python 3.11), such a poll can take the exit status away from it: the
        thread then writes a warning to standard error, which can block, and reports the status 255.
        """
        if self.pid is not None:
            self._has_sigterm |= number is signal.SIGTERM
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _pump(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(_MAX_LINE_BYTES):
            # A progress bar redraws its line with carriage returns; here each redrawing becomes a line.
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._emit(line)
        self._emit(rest)

    def _last_line(self) -> str:
        """Returns the last line as text, also of a service that logs as JSON."""
        from quire.logs import event_of  # loads structlog, which other commands do without

        return event_of(self._last_lines[-1]) if self._last_lines else ""

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_lines.append(text)
            self.num_lines += 1
            self._has_said_ready |= text.startswith("ready")
            self._log(self.name, text)
