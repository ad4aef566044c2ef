"""Chat messages to one text, by the checkpoint's chat template, which runs in a process of its own.

See `scheduler.text.chat_worker` for what holds it there. A render that breaks its bounds costs the process, which is
started again for the next one; nobody else notices. Renders run one after the other.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.core.errors import InvalidRequest, QueueFull, Unavailable
from scheduler.requests.incoming import ChatMessage
from scheduler.text.checkpoint import Checkpoint

LAST_WORDS_S = 1.0
"""A process that has closed its output, or has lost its input, has this long to end by itself."""

WORKER = Path(__file__).with_name("chat_worker.py")


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Bounds of one render, and of what waits for one.

    max_text_bytes           of the rendered text
    max_render_s             processor time, compilation of the template included
    max_memory_bytes         address space of the process that renders
    max_pending_characters   of all messages that wait; more is refused (QueueFull)
    """

    max_text_bytes: int = 2 * 2**20
    max_render_s: float = 2.0
    max_memory_bytes: int = 2**30
    max_pending_characters: int = 64 * 2**20


def load_template(checkpoint: Checkpoint) -> str | None:
    """The checkpoint's chat template; None if it has none. Raises CheckpointError for unreadable files."""
    template = checkpoint.text("chat_template.jinja")
    if template is not None:
        return template
    template = checkpoint.json_object("tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


class ChatRenderer:
    """Renders the chats of one checkpoint. Used from one event loop; `close` ends its process.

    `variables` are given to the template beside the messages: the special tokens, by role.
    """

    def __init__(self, template: str, variables: dict[str, str], limits: ChatLimits | None = None) -> None:
        self._limits = limits or ChatLimits()
        self._settings = {
            "template": template,
            "variables": variables,
            "max_text_bytes": self._limits.max_text_bytes,
            "max_render_s": self._limits.max_render_s,
            "max_memory_bytes": self._limits.max_memory_bytes,
        }
        self._worker: _Worker | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._num_pending_characters = 0

    async def start(self) -> None:
        """Starts the process ahead of the first chat, which then need not wait for it (0.2 s)."""
        async with self._turn:
            await self._living_worker()

    async def render(self, messages: Sequence[ChatMessage]) -> str:
        """Raises InvalidRequest if the template refuses the messages or breaks its bounds, QueueFull, Unavailable."""
        num_characters = sum(len(message.role) + len(message.content) for message in messages)
        if self._num_pending_characters and (
            self._num_pending_characters + num_characters > self._limits.max_pending_characters
        ):
            raise QueueFull("too many chats are waiting to be rendered")
        self._num_pending_characters += num_characters
        try:
            answer = await self._take_turn(
                {"messages": [{"role": message.role, "content": message.content} for message in messages]}
            )
        finally:
            self._num_pending_characters -= num_characters
        if "error" in answer:
            raise InvalidRequest({"chat": f"the chat template refused it: {answer['error']}"})
        return answer["text"]

    async def close(self) -> None:
        """Chats that wait, or are being rendered, end with Unavailable."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.kill()
        async with self._turn:
            await self._end_worker()

    async def _take_turn(self, message: dict[str, Any]) -> dict[str, str]:
        await self._turn.acquire()
        # A caller that gives up must not leave half an exchange in the pipes: that goes on, and keeps its turn.
        exchange = asyncio.ensure_future(self._exchange(message))
        exchange.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(exchange)

    async def _exchange(self, message: dict[str, Any]) -> dict[str, str]:
        worker = await self._living_worker()
        try:
            return await worker.ask(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return {"error": self._obituary(await self._end_worker())}

    async def _living_worker(self) -> "_Worker":
        if self._worker is None and not self._is_closed:
            self._worker = await _Worker.start(self._settings)
        if self._worker is None or self._is_closed:  # perhaps while it was starting
            raise Unavailable("the server is shutting down")
        return self._worker

    async def _end_worker(self) -> int:
        worker, self._worker = self._worker, None
        return 0 if worker is None else await worker.end()

    def _obituary(self, status: int) -> str:
        if self._is_closed:
            raise Unavailable("the server is shutting down")
        if status == -signal.SIGPROF:
            return f"it ran for more than {self._limits.max_render_s} s"
        return f"the process that ran it ended with status {status}"


class _Worker:
    """The process, and the two pipes to it."""

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
        # Isolated (-I): neither the environment nor the working directory decides what it imports.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(WORKER), stdin=pipe, stdout=pipe, env={}
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the chat worker was started without pipes")
        process.stdin.write(_framed(settings))
        return cls(process, process.stdin, process.stdout)

    async def ask(self, message: dict[str, Any]) -> dict[str, str]:
        """Raises IncompleteReadError or ConnectionError if the process ends meanwhile."""
        self._requests.write(_framed(message))
        await self._requests.drain()
        header = await self._answers.readexactly(4)
        answer: dict[str, str] = json.loads(await self._answers.readexactly(int.from_bytes(header)))
        return answer

    def kill(self) -> None:
        """Without a grace: it holds nothing, and while it renders it would not hear."""
        self._requests.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                # Not Process.kill: that polls the child, and can take the exit status from the loop's own watcher.
                os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Its exit status, negative for the signal that ended it; killed if it does not end by itself."""
        self._requests.close()
        try:
            return await asyncio.wait_for(self._process.wait(), LAST_WORDS_S)
        except TimeoutError:
            self.kill()
            return await self._process.wait()


def _framed(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4) + body
