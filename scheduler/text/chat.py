"""Renders chat messages to one text with the checkpoint's chat template, in a separate process.

`scheduler.text.chat_worker` explains the sandbox, and how clients' text is kept apart from control tokens. A render
that breaks its limits ends its process, which is started again for the next render. There are two processes; the second
is started when two chats are rendered at once. Tenants take turns, and large chats leave one process to small ones.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scheduler.core.errors import InvalidRequest, Unavailable
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.control_tokens import ControlToken
from scheduler.text.turns import Turns

EXIT_TIMEOUT_S = 1.0
"""Time that the process has to exit after one of its pipes was closed."""

NUM_WORKERS = 2

MESSAGE_CHARACTERS = 64
"""A message costs as much as this many characters, even if it is empty."""

WORKER = Path(__file__).with_name("chat_worker.py")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat. The chat template knows the roles, such as "system", "user" and "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Limits of one render, and of the messages that wait for one.

    max_text_bytes                   size of the rendered text, before control tokens are replaced by stand-ins
    max_render_s                     processor time, including the compilation of the template
    max_memory_bytes                 address space of each process that renders
    large_characters                 chats of more characters do not use all processes
    max_pending_characters           characters of all waiting messages; more are refused with QueueFull
    max_tenant_pending_characters    the same for each tenant
    """

    max_text_bytes: int = 2 * 2**20
    max_render_s: float = 2.0
    max_memory_bytes: int = 2**30
    large_characters: int = 64 * 2**10
    max_pending_characters: int = 64 * 2**20
    max_tenant_pending_characters: int = 16 * 2**20


def load_template(checkpoint: Checkpoint) -> str | None:
    """Returns the checkpoint's chat template, or None if it has none. Raises CheckpointError for unreadable files."""
    template = checkpoint.text("chat_template.jinja")
    if template is not None:
        return template
    template = checkpoint.json_object("tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


class ChatRenderer:
    """Renders the chats of one checkpoint. Used from one event loop; `close` ends its processes.

    `variables` are the special tokens by role, which the template receives with the messages. `tokens` are the control
    tokens, for whose stand-ins `Tokenizer.encode_chat` has the ids.
    """

    def __init__(
        self,
        template: str,
        variables: dict[str, str],
        limits: ChatLimits | None = None,
        tokens: Sequence[ControlToken] = (),
    ) -> None:
        self._limits = limits or ChatLimits()
        self._settings = {
            "template": template,
            "variables": variables,
            "tokens": [asdict(token) for token in tokens],
            "max_text_bytes": self._limits.max_text_bytes,
            "max_render_s": self._limits.max_render_s,
            "max_memory_bytes": self._limits.max_memory_bytes,
        }
        self._turns = Turns(
            NUM_WORKERS,
            large=self._limits.large_characters,
            max_size=self._limits.max_pending_characters,
            max_size_of_a_tenant=self._limits.max_tenant_pending_characters,
        )
        self._slots = [_WorkerSlot(self._settings) for _ in range(NUM_WORKERS)]
        self._free_slots = list(reversed(self._slots))

    async def start(self) -> None:
        """Starts a process, so that the first chat does not wait for it (0.2 s)."""
        await self._slots[0].start()

    async def render(self, messages: Sequence[ChatMessage], *, tenant: str = "default") -> str:
        """Returns the text of a chat, with stand-ins for the template's control tokens.

        Raises InvalidRequest if the template refuses the messages or breaks its limits, QueueFull if too many messages
        wait already, Unavailable after `close`.
        """
        num_characters = sum(len(each.role) + len(each.content) + MESSAGE_CHARACTERS for each in messages)
        turn = await self._turns.take(tenant, num_characters)
        slot = self._free_slots.pop()
        message = {"messages": [{"role": each.role, "content": each.content} for each in messages]}
        # If the caller is cancelled, the exchange continues and keeps its turn, so that no partial message stays in a
        # pipe.
        exchange = asyncio.ensure_future(slot.ask(message))

        def end(_: object) -> None:
            self._free_slots.append(slot)
            turn.end()

        exchange.add_done_callback(end)
        answer = await asyncio.shield(exchange)
        if isinstance(answer, int):
            raise InvalidRequest({"chat": f"the chat template refused it: {self._exit_reason(answer)}"})
        if answer.is_error:
            raise InvalidRequest({"chat": f"the chat template refused it: {answer.text}"})
        return answer.text

    async def close(self) -> None:
        """Ends the processes. Chats that wait, or are being rendered, fail with Unavailable."""
        await asyncio.gather(*(slot.close() for slot in self._slots))

    def _exit_reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"it ran for more than {self._limits.max_render_s} s"
        return f"the process that ran it ended with status {status}"


@dataclass(frozen=True, slots=True)
class _Answer:
    """A rendered chat, or the reason why there is none."""

    text: str
    is_error: bool


class _WorkerSlot:
    """One process, which is started when it is needed and again after it has ended. One chat uses it at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._worker: _Worker | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        async with self._turn:
            await self._running_worker()

    async def ask(self, message: dict[str, Any]) -> "_Answer | int":
        """Returns the answer, or the status of the process if it ended. Raises Unavailable after `close`."""
        async with self._turn:
            worker = await self._running_worker()
            try:
                return await worker.ask(message)
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
            self._worker = await _Worker.start(self._settings)
        if self._worker is None or self._is_closed:  # it may have been closed while the process was starting
            raise Unavailable("the server is shutting down")
        return self._worker

    async def _end_worker(self) -> int:
        worker, self._worker = self._worker, None
        return 0 if worker is None else await worker.end()


class _Worker:
    """The process that renders, and the pipes to and from it."""

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
    async def start(cls, settings: dict[str, Any]) -> "_Worker":
        pipe = asyncio.subprocess.PIPE
        # Isolated (-I), so that neither the environment nor the working directory changes what it imports.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(WORKER), stdin=pipe, stdout=pipe, env={}
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the chat worker was started without pipes")
        process.stdin.write(_framed(settings))
        return cls(process, process.stdin, process.stdout)

    async def ask(self, message: dict[str, Any]) -> "_Answer":
        """Returns the answer to a message. Raises IncompleteReadError or ConnectionError if the process ends."""
        await asyncio.sleep(0)  # the caller has just checked the chat: the loop runs before it is framed
        self._requests.write(_framed(message))
        await self._requests.drain()
        kind = await self._answers.readexactly(1)
        size = int.from_bytes(await self._answers.readexactly(4))
        return _Answer((await self._answers.readexactly(size)).decode(), is_error=kind != b"t")

    def kill(self) -> None:
        """Kills the process at once: it has nothing to save, and does not handle signals while it renders."""
        self._requests.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                # Process.kill polls the child, and can take the exit status away from the loop's watcher.
                os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Waits for the process to exit, or kills it. Returns its status, which is negative for a signal."""
        self._requests.close()
        try:
            return await asyncio.wait_for(self._process.wait(), EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            return await self._process.wait()


def _framed(message: dict[str, Any]) -> bytes:
    # Twice as fast as with escapes. It is one call, which holds the event loop for 7 ms at worst (control characters).
    body = json.dumps(message, ensure_ascii=False).encode()
    return len(body).to_bytes(4) + body
