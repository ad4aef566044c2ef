"""Keeps child processes running: starts them, passes on what they print, restarts them, ends them in order.

No child outlives the supervisor: each runs behind `lifeline`, so the kernel kills it when this process dies in any way.
Each child leads a session of its own, so a Ctrl-C in the terminal reaches the supervisor alone, which then decides who
ends first.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from quire.cli.restarts import RestartBudget, RestartPolicy

_LIFELINE = str(Path(__file__).with_name("lifeline.py"))
_MAX_LINE_BYTES = 1 << 16

# Called with a child's name and one line of its output, or a line about it (name "supervisor"). It neither blocks nor
# raises: a supervisor that waits for whoever reads the log restarts nobody.
LogSink: TypeAlias = Callable[[str, str], None]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep.

    name     in messages
    grace_s  how long it may take to end after SIGTERM; then it is killed
    """

    name: str
    command: tuple[str, ...]
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child ended. `return_code` as in subprocess: negative is the signal that killed it; None: there was no
    process, because the system had none to give, or no memory."""

    name: str
    return_code: int | None
    last_line: str

    @property
    def ended_well(self) -> bool:
        """As it should after SIGTERM: with status 0, or by that signal before it could handle it."""
        return self.return_code in (0, -signal.SIGTERM)

    @property
    def exit_code(self) -> int:
        """What a supervisor that cannot go on should exit with: never 0, and 128 + n after signal n."""
        if self.return_code is None:
            return 1
        if self.return_code < 0:
            return 128 - self.return_code
        return self.return_code or 1

    def __str__(self) -> str:
        if self.return_code is None:
            return f"{self.name} could not be started"
        if self.return_code < 0:
            return f"{self.name} was killed by {signal.Signals(-self.return_code).name}"
        return f"{self.name} exited with status {self.return_code}"


class ChildFailed(Exception):
    """A child could not be started, or keeps dying. `exit_code` is what this process should exit with."""

    def __init__(self, problem: str, last: ChildExit) -> None:
        super().__init__(f"{problem}: {last.last_line}" if last.last_line else problem)
        self.exit_code = last.exit_code
        self.child_exit = last


class Supervisor:
    """Starts `specs` in order and keeps them running until `stop`, which ends them in that order too.

    A child that ends before the whole was ready (see `until_ready`) is a failure; one that ends later is restarted
    under `policy`, until that calls it a crash loop. Failures come out of `until_ready`, `failure` and `beside`.
    Use it as an async context manager: leaving it stops what still runs.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        log: LogSink,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._children = [_Child(spec, log) for spec in specs]
        self._budgets = {spec.name: RestartBudget(policy or RestartPolicy()) for spec in specs}
        self._log = log
        self._was_ready = False
        self._failed: asyncio.Future[ChildFailed] | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Starts all children and returns; nothing is known about their health yet."""
        self._failed = asyncio.get_running_loop().create_future()
        for child in self._children:
            await child.start()
            self._keepers[child.name] = asyncio.create_task(self._keep(child))

    async def until_ready(self, probe: Callable[[], Awaitable[bool]], interval_s: float = 0.1) -> None:
        """Asks `probe` until it says True. Raises ChildFailed as soon as a child ends before that."""

        async def ask() -> None:
            while not await probe():  # noqa: ASYNC110 - asking is all there is, across processes
                await asyncio.sleep(interval_s)

        await self.beside(ask())
        self._was_ready = True

    async def beside(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs `work` while the children run. Where one of them fails for good, cancels it and raises ChildFailed."""
        working = asyncio.ensure_future(work)
        failure = asyncio.ensure_future(self.failure())
        try:
            await asyncio.wait({working, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            return working.result()
        finally:
            failure.cancel()
            working.cancel()
            await asyncio.wait({working})

    async def failure(self) -> ChildFailed:
        """Waits until some child cannot be kept running, and says why."""
        if self._failed is None:
            raise RuntimeError("the supervisor has not been started")
        return await asyncio.shield(self._failed)

    def pid(self, name: str) -> int | None:
        """Process id of a child; None while it does not run."""
        return next(child.pid for child in self._children if child.name == name)

    def has_said_ready(self, name: str) -> bool:
        """Whether the process of a child that runs now has printed a line that begins with `ready`."""
        return any(child.name == name and child.has_said_ready for child in self._children)

    def kill_hung(self, name: str, silent_s: float) -> None:
        """SIGKILL to a child that runs and does nothing, whatever it does; it is restarted like one that died."""
        for child in self._children:
            if child.name == name:
                child.kill()
        self._log("supervisor", f"{name} has not served for {silent_s:g} s: killed")

    async def stop(self) -> list[ChildExit]:
        """SIGTERM to one child after the other, each waited for. Returns how those ended that were not gone yet."""
        exits = []
        for child in self._children:
            keeper = self._keepers.pop(child.name, None)
            if keeper is None:
                continue
            was_running = child.pid is not None
            child.terminate()
            await asyncio.wait({keeper}, timeout=child.grace_s)
            if not keeper.done():
                child.kill()
                self._log("supervisor", f"{child.name} did not end within {child.grace_s:g} s: killed")
            await keeper
            if was_running and child.last_exit is not None:
                exits.append(child.last_exit)
        return exits

    def kill(self) -> None:
        """SIGKILL to all at once; a `stop` under way then returns soon."""
        for child in self._children:
            child.terminate()
            child.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()  # nobody is going to wait for a drain
        await self.stop()

    async def _keep(self, child: "_Child") -> None:
        """Waits for the child's end, restarts it, and so on until it is told to end or there is no hope."""
        while True:
            ended = await child.wait()
            if child.is_stopping:
                return
            if not self._was_ready:
                self._fail(ChildFailed(f"{ended} before it was ready", ended))
                return
            delay_s = self._budgets[child.name].next_delay_s(asyncio.get_running_loop().time())
            if delay_s is None:
                self._fail(ChildFailed(f"{ended}, again and again", ended))
                return
            self._log("supervisor", f"{ended}; restarting it in {delay_s:g} s")
            if await child.stopping_within(delay_s):
                return
            await child.start()

    def _fail(self, failure: ChildFailed) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(failure)


class _Child:
    """One child: at most one process of it at a time."""

    def __init__(self, spec: ChildSpec, log: LogSink) -> None:
        self.name = spec.name
        self.grace_s = spec.grace_s
        self._command = spec.command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=1)
        self._stopping = asyncio.Event()
        self._has_said_ready = False
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
        """Where the system has no process to give, `wait` says so: that is an end like others, and may pass."""
        self._last_lines.clear()
        self._has_said_ready = False
        self._process = None
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                _LIFELINE,
                str(os.getpid()),
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._emit(str(error).encode())
            return
        if self.is_stopping:  # told so while the process was being made
            self._process.terminate()

    async def wait(self) -> ChildExit:
        """Passes on the output until the process ends."""
        process = self._process
        if process is None or process.stdout is None:
            return ChildExit(self.name, None, self._last_lines[-1] if self._last_lines else "")
        output = asyncio.create_task(self._pump(process.stdout))
        return_code = await process.wait()
        # The rest of the output; bounded, because a grandchild could hold the pipe open.
        await asyncio.wait({output}, timeout=1.0)
        output.cancel()
        self.last_exit = ChildExit(self.name, return_code, self._last_lines[-1] if self._last_lines else "")
        return self.last_exit

    async def stopping_within(self, seconds: float) -> bool:
        """Waits so long at most; True as soon as the child is told to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self.is_stopping

    def terminate(self) -> None:
        """No more restarts; SIGTERM if a process runs."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the process and to all it started."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _pump(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(_MAX_LINE_BYTES):
            # A progress bar redraws its line with carriage returns: each state is a line here.
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._emit(line)
        self._emit(rest)

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_lines.append(text)
            self._has_said_ready |= text.startswith("ready")
            self._log(self.name, text)
