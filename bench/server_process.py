"""Servers as processes for the time of a measurement. None of them outlives this process."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.command_line import BenchError
from quire.command import lifeline
from quire.errors import QuireError

LogSink = Callable[[str], None]

ON_FREE_PORTS = (
    *(
        word
        for flag in ("--listen", "--http-listen", "--executor", "--metrics-address")
        for word in (flag, "127.0.0.1:0")
    ),
    "--no-gateway",
)
_MAX_LINE_BYTES = 1 << 20
_NUM_LAST_LINES = 10
_MAX_STOP_S = 60.0
_MAX_READ_S = 5.0
_LOOK_S = 1.0
_IDLE_SHARE = 0.05
_MAX_WAIT_S = 120.0


class ServerFailed(BenchError):
    """A server ended before or during the measurement, or one of its services was restarted."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Child:
    """A process that is ready. `line` is its ready line."""

    pid: int
    line: str

    @property
    def addresses(self) -> dict[str, str]:
        """The `name=address` pairs of the ready line."""
        return dict(word.split("=", 1) for word in self.line.split() if "=" in word)


@contextlib.asynccontextmanager
async def child_process(
    *arguments: str, ready: str = "ready ", log: LogSink = lambda line: None
) -> AsyncIterator[Child]:
    """Runs `python -m ARGUMENTS`. The block begins when it prints a line that starts with `ready`.

    log  called with each line of its standard error; if it fails, the last lines are part of the error

    At the end of the block it gets SIGTERM, and SIGKILL after another minute. Raises ServerFailed if it ends
    before it is ready.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *lifeline(), sys.executable, "-m", *arguments,
        stdout=pipe, stderr=pipe, limit=_MAX_LINE_BYTES, start_new_session=True,
    )  # fmt: skip
    last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
    reader = asyncio.create_task(_read_log(process.stderr, last_lines, log))
    try:
        line = await _first_line(process.stdout, ready)
        if not line:
            await process.wait()
            await asyncio.wait({reader}, timeout=_MAX_READ_S)
            raise _failure(arguments, process, last_lines)
        try:
            yield Child(process.pid, line)
        except QuireError as error:
            if process.returncode is not None:
                raise _failure(arguments, process, last_lines) from error
            raise
    finally:
        await _end(process)
        await asyncio.wait({reader}, timeout=_MAX_READ_S)
        reader.cancel()


@contextlib.asynccontextmanager
async def quire_server(flags: Sequence[str], log: LogSink = lambda line: None) -> AsyncIterator[Child]:
    """Runs `quire serve` with `flags` on free ports; `addresses` has grpc, http, executor and metrics.

    Raises ServerFailed if a service ended during the block: `quire serve` restarts it, but the measurement is invalid.
    """
    async with child_process("quire", "serve", *ON_FREE_PORTS, *flags, log=log) as server:
        services = _children(server.pid)
        yield server
        if _children(server.pid) != services:
            raise ServerFailed("a service was restarted during the measurement")


async def until_idle(pids: Sequence[int], max_wait_s: float = _MAX_WAIT_S) -> bool:
    """Waits until these processes and their children together use less than a twentieth of a core for a second.

    A server that is ready may still be busy for half a minute, because the executor allocates the memory of its pool
    while no step arrives. In the turn of another engine, that would take the other engine's cores. Returns False if
    they are still busy after `max_wait_s`.
    """
    deadline_s = time.monotonic() + max_wait_s
    used_s = _processor_s(pids)
    while time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)
        before_s, used_s = used_s, _processor_s(pids)
        if 0 <= used_s - before_s < _IDLE_SHARE * _LOOK_S:  # less than 0: a process has ended, and others may be busy
            return True
    return False


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Turns {"num_blocks": 512, "chunked": False} into ["--num-blocks", "512", "--no-chunked"]."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def _children(pid: int) -> set[int]:
    import psutil  # installed with the executor, which every server started here needs

    try:
        return {child.pid for child in psutil.Process(pid).children()}
    except psutil.NoSuchProcess:
        return set()


def _processor_s(pids: Sequence[int]) -> float:
    """Returns the processor time that the processes and their children have used; those that have ended use none."""
    import psutil

    total_s = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    total_s += times.user + times.system
    return total_s


async def _first_line(output: asyncio.StreamReader | None, start: str) -> str:
    """Returns the first line that starts with this text; "" if the output ends before."""
    while output is not None and (line := (await output.readline()).decode(errors="replace")):
        if line.startswith(start):
            return line.strip()
    return ""


async def _read_log(log: asyncio.StreamReader | None, last_lines: deque[str], sink: LogSink) -> None:
    """Reads to the end, so that the process never waits for a full pipe."""
    while log is not None and (line := (await log.readline()).decode(errors="replace")):
        last_lines.append(line.rstrip())
        sink(line.rstrip())


def _failure(arguments: Sequence[str], process: asyncio.subprocess.Process, last_lines: deque[str]) -> ServerFailed:
    """Returns the error for a process that ended. Signal n becomes the exit code 128 + n."""
    status = process.returncode or 1
    log = "".join(f"\n{line}" for line in last_lines)
    name = " ".join(arguments[:2])
    return ServerFailed(
        f"{name} ended with status {process.returncode}{':' if log else ''}{log}",
        status if status > 0 else 128 - status,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Sends SIGTERM, and SIGKILL after a minute; waits until the process has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _MAX_STOP_S)
            return
