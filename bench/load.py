"""Closed-loop load: each client has one request in flight at any time, until the trace is used up."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from bench.command_line import BenchError
from bench.trace import TraceRequest
from quire.async_client import AsyncClient
from quire.events import Delta, Finished
from quire.options import GenerateOptions


class LoadError(BenchError):
    """A request of the trace did not get the requested answer, so the measurement is invalid."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it; times in seconds on one monotonic clock.

    sent_s             when the request was handed to the transport
    arrivals_s         when each message with tokens arrived, ascending, at least one
    num_cached_tokens  tokens of the prompt that the engine found in its cache; None: it does not say
    token_ids          of the output, where the client kept them
    samples            the sample of each message, where a request has several
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token of a sample after the first; None for a single token."""
        num_tokens = self.num_output_tokens / max(1, len(set(self.samples)))
        if num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (num_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the pauses between messages of a sample. A message may carry several tokens."""
        last_s: dict[int, float] = {}
        pauses = []
        for sample, arrival_s in zip(self.samples or (0,) * len(self.arrivals_s), self.arrivals_s, strict=True):
            if sample in last_s:
                pauses.append(arrival_s - last_s[sample])
            last_s[sample] = arrival_s
        return pauses

    @property
    def latency_s(self) -> float:
        """Time from sending to the last token."""
        return self.arrivals_s[-1] - self.sent_s


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of one run in the order in which they ended, and the duration of the run."""

    concurrency: int
    wall_s: float
    records: tuple[RequestRecord, ...]

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the engine found in its cache; None if it does not say."""
        known = [record.num_cached_tokens for record in self.records if record.num_cached_tokens is not None]
        return sum(known) if len(known) == len(self.records) else None


# Sends one request and returns when its answer is complete. Raises LoadError or the client's own error.
Send: TypeAlias = Callable[[TraceRequest], Awaitable[RequestRecord]]


async def closed_loop(send: Send, trace: Sequence[TraceRequest], concurrency: int) -> LoadResult:
    """Runs the trace with `concurrency` clients that take requests in order. The first error ends the run."""
    remaining = iter(trace)
    records: list[RequestRecord] = []
    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(trace))):
                clients.create_task(_client(send, remaining, records))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return LoadResult(concurrency, time.perf_counter() - start_s, tuple(records))


async def _client(send: Send, remaining: Iterable[TraceRequest], records: list[RequestRecord]) -> None:
    for request in remaining:
        records.append(await send(request))  # noqa: PERF401 - other clients append between two of ours


def quire_sender(client: AsyncClient, schema: dict[str, Any] | None = None) -> Send:
    """Sends requests that ignore EOS, so that every server does the same work.

    schema  restricts the outputs; none of its texts may be shorter than a request's `max_tokens`
    """

    async def send(request: TraceRequest) -> RequestRecord:
        arrivals_s: list[float] = []
        token_ids: list[int] = []
        samples: list[int] = []
        num_cached = 0
        sent_s = time.perf_counter()
        options = GenerateOptions(max_tokens=request.max_tokens, **request.sampling)  # type: ignore[typeddict-item]
        options |= {"ignore_eos": True} if schema is None else {"json_schema": schema}
        events = client.generate(request.prompt_token_ids, **options)
        async with events:
            async for event in events:
                if isinstance(event, Delta) and event.token_ids:
                    arrivals_s.append(time.perf_counter())
                    token_ids += event.token_ids
                    samples.append(event.index)
                elif isinstance(event, Finished):
                    num_cached = event.usage.cached_tokens
        record = checked_record(request, sent_s, arrivals_s, len(token_ids), num_cached)
        return replace(record, token_ids=tuple(token_ids), samples=tuple(samples))

    return send


def checked_record(
    request: TraceRequest,
    sent_s: float,
    arrivals_s: Sequence[float],
    num_tokens: int,
    num_cached: int | None = None,
) -> RequestRecord:
    """Returns the record of a request. Raises LoadError if the answer is not complete."""
    num_wanted = request.max_tokens * request.num_samples
    if num_tokens != num_wanted or not arrivals_s:
        raise LoadError(f"asked for {num_wanted} tokens, got {num_tokens}")
    return RequestRecord(sent_s, tuple(arrivals_s), len(request.prompt_token_ids), num_tokens, num_cached)
