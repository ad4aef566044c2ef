"""Keeps child processes running: starts them, restarts them, and ends them in order.

A Ctrl-C in the terminal reaches only the supervisor, which then decides the order in which the children end.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from quire.cli.child import Child, ChildExit, ChildSpec, LogSink
from quire.cli.restarts import Backoff, RestartPolicy

_T = TypeVar("_T")
_ABORT_GRACE_S = 2.0


class ChildFailed(Exception):
    """A child cannot be started. `exit_code` is the exit code for this process."""

    def __init__(self, problem: str, last: ChildExit) -> None:
        super().__init__(f"{problem}: {last.last_line}" if last.last_line else problem)
        self.exit_code = last.exit_code


class Supervisor:
    """Starts the children in the order of `specs` and keeps them running until `stop` ends them in the same order.

    A child that ends is restarted under `policy`, again and again. Only before `until_ready` has returned, an end can
    be a failure: the policy says which. `until_ready`, `failure` and `beside` report failures. Use it as an async
    context manager: leaving it stops the children that still run.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        log: LogSink,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._children = [Child(spec, log) for spec in specs]
        self._policy = policy or RestartPolicy()
        self._log = log
        self._was_ready = False
        self._failed: asyncio.Future[ChildFailed] | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Starts all children and returns, without waiting for them to be ready."""
        self._failed = asyncio.get_running_loop().create_future()
        for child in self._children:
            await child.start()
            self._keepers[child.name] = asyncio.create_task(self._keep(child))

    async def until_ready(self, probe: Callable[[], Awaitable[bool]], interval_s: float = 0.1) -> None:
        """Calls `probe` until it returns True. Raises ChildFailed as soon as a child fails before that."""

        async def ask() -> None:
            while not await probe():  # noqa: ASYNC110 - another process cannot set an event of this loop
                await asyncio.sleep(interval_s)

        await self.beside(ask())
        self._was_ready = True

    async def beside(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs `work` while the children run. If a child fails for good, cancels it and raises ChildFailed."""
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
        """Waits until a child cannot be kept running; returns the reason."""
        if self._failed is None:
            raise RuntimeError("the supervisor has not been started")
        return await asyncio.shield(self._failed)

    def pid(self, name: str) -> int | None:
        """Returns the process id of a child, or None while it does not run."""
        return self._child(name).pid

    def has_said_ready(self, name: str) -> bool:
        """Returns True if the current process of a child has printed a line that begins with `ready`."""
        return self._child(name).has_said_ready

    def num_lines(self, name: str) -> int:
        """Returns the number of lines that all processes of a child have printed."""
        return self._child(name).num_lines

    async def end_hung(self, name: str, problem: str) -> None:
        """Ends a process that runs but does not serve. It is then restarted like one that died.

        At SIGABRT Python prints the stacks of all threads, if its faulthandler is on. A stopped process cannot, and is
        killed soon after.
        """
        self._log("supervisor", f"{name} {problem}: killed")
        await self._child(name).end(signal.SIGABRT, _ABORT_GRACE_S)

    async def replace(self, name: str) -> None:
        """Ends the process of a child as `stop` does, but restarts it. Returns when it has ended."""
        child = self._child(name)
        if not await child.end(signal.SIGTERM, child.grace_s):
            self._log("supervisor", f"{name} did not end within {child.grace_s:g} s: killed")

    def hurry(self, name: str) -> None:
        """Sends SIGTERM once more to a child that `replace` is ending."""
        self._child(name).send(signal.SIGTERM)

    async def stop(self) -> list[ChildExit]:
        """Terminates one child after the other, waiting for each. Returns the ends of those that still ran."""
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
        """Kills all children at once, so that a `stop` in progress returns soon."""
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
            self.kill()  # after an error, draining has no purpose
        await self.stop()

    async def _keep(self, child: Child) -> None:
        """Restarts the child whenever it ends, until it is told to end or cannot be started at all."""
        loop, backoff = asyncio.get_running_loop(), Backoff(self._policy)
        while True:
            started_s = loop.time()
            ended = await child.wait()
            if child.is_stopping:
                return
            if not self._was_ready and self._policy.is_fatal_at_start(ended.return_code):
                self._fail(ChildFailed(f"{ended} before it was ready", ended))
                return
            delay_s = backoff.next_delay_s(loop.time() - started_s)
            times = f" (restart {backoff.num_in_a_row} in a row)" if backoff.num_in_a_row > 1 else ""
            self._log("supervisor", f"{ended}; restarting it in {delay_s:g} s{times}")
            if await child.stopping_within(delay_s):
                return
            await child.start()

    def _child(self, name: str) -> Child:
        return next(child for child in self._children if child.name == name)

    def _fail(self, failure: ChildFailed) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(failure)
