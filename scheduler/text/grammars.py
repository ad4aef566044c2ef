"""Compiles grammars of structured output in a separate process, so that a hostile one costs a bounded time and memory.

    GrammarDefinition ──► cache ──► WorkerPool (grammar_worker) ──► CompiledGrammar

A grammar is compiled before its request is queued: what the executor receives has passed the same compiler with the
same limits. The cache also has grammars that were refused. Tenants take turns, none holds all processes, and none
learns from the cache what others have sent.
"""

import asyncio
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from scheduler.text.workers import NUM_TRIES, Answer, WorkerPool

NUM_WORKERS = 3
"""Most processes. They are started when they are needed, and a tenant has at most two of them."""

TIME, MEMORY = "grammar_time", "grammar_memory"
"""The limits that a compilation can reach."""

MIN_SIZE = 4096
"""A small grammar waits for its turn like one of this many characters, because it can take as long."""

_OUT_OF_MEMORY = frozenset({-signal.SIGABRT, -signal.SIGBUS})
"""Exit statuses of llguidance if it gets no memory."""

_OUT_OF_STACK = -signal.SIGSEGV
"""Exit status of llguidance if its stack has no room, see `grammar_worker`."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of compilations, and of the cache.

    max_s              processor time of one grammar
    max_memory_bytes   address space of each process, in addition to the vocabulary
    max_cache_bytes    results that are kept; the last used ones stay
    """

    max_s: float = 0.3
    max_memory_bytes: int = 512 * 2**20
    max_cache_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True)
class GrammarDefinition:
    """A grammar as a client has written it: a JSON schema, a regular expression, Lark, or a JSON list of choices.

    kind  "json_schema", "regex", "lark" or "choice"
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The result of a compilation.

    text     the grammar in llguidance's JSON form; empty if it is refused
    problem  why it is refused
    limit    TIME or MEMORY if it has reached that limit
    """

    text: str = ""
    problem: str = ""
    limit: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the result in the cache."""
        return 512 + sys.getsizeof(self.text) + sys.getsizeof(self.problem)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled grammar and how long it took, waiting included. `seconds` is None if the cache had it."""

    grammar: CompiledGrammar
    seconds: float | None = None


class GrammarCompiler:
    """Compiles the grammars for one checkpoint. Used from one event loop; `close` ends its processes."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: Sequence[int], limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        settings = {
            "tokenizer": str(tokenizer_file),
            "eos_token_ids": list(eos_token_ids),
            "max_s": self._limits.max_s,
            "max_memory_bytes": self._limits.max_memory_bytes,
        }
        self._workers = WorkerPool("grammar_worker", settings, NUM_WORKERS)
        self._cache = GrammarCache(self._limits.max_cache_bytes)
        self._running: dict[bytes, asyncio.Task[CompiledGrammar]] = {}

    async def compile(self, definition: GrammarDefinition, vocab_size: int, tenant: str) -> Compilation:
        """Returns the grammar, or why it is refused. Requests for the same grammar share one compilation.

        vocab_size  the width of the model's logits, which never changes

        Raises QueueFull if too many grammars wait already, and Unavailable after `close`.
        """
        start_s = time.monotonic()
        key = sha256("\0".join((tenant, definition.kind, definition.text)).encode()).digest()
        if (known := self._cache.get(key)) is not None:
            return Compilation(known)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._compile(key, definition, vocab_size, tenant))
            task.add_done_callback(lambda task: self._ended(key, task))
        grammar = await asyncio.shield(task)  # others may wait for it too
        return Compilation(grammar, time.monotonic() - start_s)

    async def close(self) -> None:
        """Ends the processes. Grammars that wait, or are being compiled, fail with Unavailable."""
        await self._workers.close()

    def _ended(self, key: bytes, task: asyncio.Task[CompiledGrammar]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # counts as seen, if every caller has gone

    async def _compile(
        self, key: bytes, definition: GrammarDefinition, vocab_size: int, tenant: str
    ) -> CompiledGrammar:
        message = {"kind": definition.kind, "text": definition.text, "vocab_size": vocab_size}
        size = max(MIN_SIZE, len(definition.text))
        for _ in range(NUM_TRIES):
            answer = await self._workers.ask(message, tenant, size)
            result = self._result(answer)
            if result is not None:
                self._cache.put(key, result)
                return result
        return CompiledGrammar(problem=f"could not be compiled: the process ended with status {answer}")

    def _result(self, answer: Answer | int) -> CompiledGrammar | None:
        """Returns the result in an answer; None if something else than the grammar has ended the process."""
        match answer:
            case Answer(kind=b"g", text=grammar):
                return CompiledGrammar(text=grammar)
            case Answer(kind=b"e", text=problem):
                return CompiledGrammar(problem=problem)
            case int() as status if status == -signal.SIGPROF:
                return CompiledGrammar(problem=f"takes more than {self._limits.max_s:g} s to compile", limit=TIME)
            case int() as status if status == _OUT_OF_STACK:
                return CompiledGrammar(problem="refers from rule to rule too deeply to compile", limit=MEMORY)
            case int() as status if status not in _OUT_OF_MEMORY:
                return None
        megabytes = self._limits.max_memory_bytes >> 20
        return CompiledGrammar(problem=f"needs more than {megabytes} MiB to compile", limit=MEMORY)


class GrammarCache:
    """Keeps the results that were used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._results: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: bytes) -> CompiledGrammar | None:
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: bytes, result: CompiledGrammar) -> None:
        """Adds a result under a new key."""
        self._results[key] = result
        self.num_bytes += result.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._results.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
