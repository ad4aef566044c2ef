"""Compiles the grammars of requests, and bounds the memory that grammars of open requests take."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler.core import InvalidRequest, QueueFull
from scheduler.requests.structured_output import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler.telemetry.metrics import SchedulerMetrics
    from scheduler.text.grammars import GrammarCompiler, GrammarDefinition

MAX_BYTES = 64 << 20
"""Bytes of the different grammars of all open requests. More are refused with QueueFull."""

MAX_TENANT_BYTES = 16 << 20


class OpenGrammars:
    """Holds the grammars of open requests. Requests of one tenant with the same grammar share one text.

    compiler  None if the model cannot have grammars
    """

    def __init__(self, compiler: GrammarCompiler | None, metrics: SchedulerMetrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self._texts: dict[tuple[str, str], str] = {}
        self._num_holders: Counter[tuple[str, str]] = Counter()
        self._num_bytes: Counter[str] = Counter()  # by tenant

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    @contextmanager
    def held(self, tenant: str) -> Iterator[GrammarHolder]:
        """Yields the holder of one request's grammar, which is given back when the block is left."""
        holder = GrammarHolder(tenant)
        try:
            yield holder
        finally:
            self._give_back(holder)

    async def compiled(self, definition: GrammarDefinition, vocab_size: int, holder: GrammarHolder) -> str:
        """Returns a request's grammar. Raises InvalidRequest if it cannot be used, QueueFull, and Unavailable."""
        if self._compiler is None:
            raise InvalidRequest({"structured_output": "this server has no compiler of grammars"})
        compilation = await self._compiler.compile(definition, vocab_size, holder.tenant)
        self._metrics.compiled_grammar(compilation)
        if compilation.grammar.problem:
            raise InvalidRequest({KINDS[definition.kind]: compilation.grammar.problem})
        return self._hold(holder, compilation.grammar.text)

    def _hold(self, holder: GrammarHolder, text: str) -> str:
        key = holder.tenant, text
        if key not in self._texts:
            size = len(text)
            if self._num_bytes[holder.tenant] + size > MAX_TENANT_BYTES or self.num_bytes + size > MAX_BYTES:
                raise QueueFull("the open requests have too many different grammars")
            self._texts[key] = text
            self._num_bytes[holder.tenant] += size
        self._num_holders[key] += 1
        holder.text = self._texts[key]
        return holder.text

    def _give_back(self, holder: GrammarHolder) -> None:
        if holder.text is None:
            return
        key = holder.tenant, holder.text
        self._num_holders[key] -= 1
        if not self._num_holders[key]:
            del self._num_holders[key], self._texts[key]
            self._num_bytes[holder.tenant] -= len(holder.text)
            if not self._num_bytes[holder.tenant]:
                del self._num_bytes[holder.tenant]


class GrammarHolder:
    """The grammar that one open request holds; None until it is compiled, and if it has none."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.text: str | None = None
