"""Runs work on clients' texts in separate processes, whose processor time and memory the kernel limits.

A chat template and a grammar are untrusted programs: one of them can compute without end, inside a library that no
exception interrupts. A task that breaks its limits ends its process, which is started again for the next task. Tenants
take turns, and large tasks leave one process to small ones.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import version
from scheduler.core.errors import Unavailable
from scheduler.text.turns import Turns

EXIT_TIMEOUT_S = 1.0
"""Time that a process has to exit after one of its pipes was closed."""

NUM_TRIES = 2
"""Most times that a task is tried, if something else than the task may have ended the process."""

LARGE = 64 * 2**10
"""Size of a task beyond which its message is made in a thread."""

WORKER = """
import signal
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
import importlib, sys, types
for name, path in (("text", sys.argv[2]), ("quire", sys.argv[3])):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
importlib.import_module("text." + sys.argv[1]).main()
"""
"""Runs a module of this folder, which is the package `text`. The packages above it, and `quire` itself, would import
far more than a worker needs. Ctrl-C and a terminal that closes end the parent; a worker ends when its input is closed.
Both signals are ignored before the module is loaded, which takes a tenth of a second."""

FOLDERS = str(Path(__file__).parent), str(Path(version.__file__).parent)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a worker. `kind` is a letter, whose meaning the worker's module defines."""

    kind: bytes
    text: str


class WorkerPool:
    """A few processes that run the same module. Used from one event loop; `close` ends them.

    module    the name of a module in this folder, with a function `main`
    settings  the first message that each process receives
    """

    def __init__(self, module: str, settings: dict[str, Any], num_workers: int) -> None:
        self._turns = Turns.of_texts(num_workers, spares_slots=True)
        self._slots = [_WorkerSlot(module, settings) for _ in range(num_workers)]
        self._free_slots = list(reversed(self._slots))

    async def start(self) -> None:
        """Starts a process, so that the first task does not wait for it."""
        await self._slots[0].start()

    async def ask(self, message: dict[str, Any], tenant: str, size: int) -> Answer | int:
        """Returns a worker's answer, or the exit status of its process if it ended instead.

        Raises QueueFull if too much waits already, and Unavailable after `close`.
        """
        turn = await self._turns.take(tenant, size)
        slot = self._free_slots.pop()
        # If the caller is cancelled, the exchange continues and keeps its turn, so that no partial message stays in a
        # pipe.
        exchange = asyncio.ensure_future(_ask(slot, message, size))

        def end(_: object) -> None:
            self._free_slots.append(slot)
            turn.end()

        exchange.add_done_callback(end)
        return await asyncio.shield(exchange)

    async def close(self) -> None:
        """Ends the processes. Tasks that wait or run fail with Unavailable."""
        await asyncio.gather(*(slot.close() for slot in self._slots))


async def _ask(slot: "_WorkerSlot", message: dict[str, Any], size: int) -> Answer | int:
    return await slot.ask(await asyncio.to_thread(_framed, message) if size > LARGE else _framed(message))


class _WorkerSlot:
    """One process, which is started when it is needed and again after it has ended. One task uses it at a time."""

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        self._module = module
        self._settings = settings
        self._worker: _Worker | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        async with self._turn:
            await self._running_worker()

    async def ask(self, frame: bytes) -> Answer | int:
        """Returns the answer, or the status of the process if it ended. Raises Unavailable after `close`."""
        async with self._turn:
            worker = await self._running_worker()
            try:
                return await worker.ask(frame)
            except (asyncio.IncompleteReadError, ConnectionError):
                status = await self._end_worker()
            if self._is_closed:
                raise Unavailable("the server is shutting down")
            return status

    async def close(self) -> None:
        self._is_closed = True
        if self._worker is not None:
            self._worker.kill()
        async with self._turn:
            await self._end_worker()

    async def _running_worker(self) -> "_Worker":
        if self._worker is None and not self._is_closed:
            self._worker = await _Worker.start(self._module, self._settings)
        if self._worker is None or self._is_closed:  # it may have been closed while the process was starting
            raise Unavailable("the server is shutting down")
        return self._worker

    async def _end_worker(self) -> int:
        worker, self._worker = self._worker, None
        return 0 if worker is None else await worker.end()


class _Worker:
    """A process, and the pipes to and from it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        requests: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
    ) -> None:
        self._process = process
        self._requests = requests
        self._answers = answers

    @classmethod
    async def start(cls, module: str, settings: dict[str, Any]) -> "_Worker":
        pipe = asyncio.subprocess.PIPE
        # Isolated (-I), so that neither the environment nor the working directory changes what it imports.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", WORKER, module, *FOLDERS, stdin=pipe, stdout=pipe, env={}
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a worker was started without pipes")
        process.stdin.write(_framed(settings))
        return cls(process, process.stdin, process.stdout)

    async def ask(self, frame: bytes) -> Answer:
        """Returns the answer to a message. Raises IncompleteReadError or ConnectionError if the process ends."""
        self._requests.write(frame)
        await self._requests.drain()
        kind = await self._answers.readexactly(1)
        size = int.from_bytes(await self._answers.readexactly(4))
        return Answer(kind, (await self._answers.readexactly(size)).decode())

    def kill(self) -> None:
        """Kills the process at once: it has nothing to save, and does not handle signals while it works."""
        self._requests.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                # Process.kill polls the child, and can take the exit status away from the loop's watcher.
                os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Waits for the process to exit, or kills it. Returns its status, which is negative for a signal."""
        self._requests.close()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()


def _framed(message: dict[str, Any]) -> bytes:
    """Returns the message as a worker reads it: its length, then its text."""
    # In Python, text by text: one call for the whole message would keep the interpreter lock, and so the event loop,
    # for 13 ms. Without escapes of non-ASCII characters it takes half the time.
    body = "".join(json.JSONEncoder(ensure_ascii=False).iterencode(message)).encode()
    return len(body).to_bytes(4) + body
