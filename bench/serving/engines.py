"""The engines of a serving measurement. Each runs a trace in a closed loop and returns what its clients observed."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from bench.load import LoadResult, Send, closed_loop, quire_sender
from bench.pool_sampler import PoolSampler, PoolStats
from bench.step_traces import StepRecorder
from bench.trace import TraceRequest
from quire.async_client import AsyncClient
from quire.block_map import StepTrace

_POOL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations of one run. Only Quire reports its pool and its steps."""

    load: LoadResult
    pool: PoolStats | None = None
    steps: tuple[StepTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can run a trace with a number of clients.

    name           "quire", "peer", "transformers", …: the engine's name in reports
    process_group  its processes, which are stopped while other engines have their turn; None: it needs no stopping
    """

    name: str
    run: Callable[[Sequence[TraceRequest], int], Awaitable[Observed]]
    process_group: int | None = None


class Batches(Protocol):
    """A model in this process: StaticBatches or ContinuousBatches."""

    def run(self, trace: Sequence[TraceRequest], concurrency: int) -> LoadResult: ...


def quire_engine(
    client: AsyncClient, *, pool_interval_s: float | None = _POOL_INTERVAL_S, send: Send | None = None
) -> Engine:
    """Returns an engine for a Quire server, with an empty prefix cache at the start of each run.

    pool_interval_s  time between two samples of the block pool; None: it is not sampled
    send             sends one request; default: `quire_sender`
    """
    send_request = send or quire_sender(client)

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        await client.reset_prefix_cache()  # an earlier measurement may have left the same prompts
        if pool_interval_s is None:
            async with StepRecorder(client) as recorder:
                result = await closed_loop(send_request, trace, concurrency)
            return Observed(result, steps=recorder.steps)
        async with StepRecorder(client) as recorder, PoolSampler(client, pool_interval_s) as sampler:
            result = await closed_loop(send_request, trace, concurrency)
        return Observed(result, sampler.stats, recorder.steps)

    return Engine("quire", run)


def grpc_engine(name: str, client: AsyncClient) -> Engine:
    """Returns an engine for a Quire server that gets nothing but requests, so that two versions have the same work."""

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        return Observed(await closed_loop(quire_sender(client), trace, concurrency))

    return Engine(name, run)


def openai_engine(url: str, model: str, process_group: int | None = None) -> Engine:
    """Returns an engine for an OpenAI-compatible server.

    Each run opens its own connections, because idle ones time out while the server is stopped.
    """
    from bench.serving.openai_server import openai_sender, openai_session  # aiohttp is not installed everywhere

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        async with openai_session() as session:
            return Observed(await closed_loop(openai_sender(session, url, model), trace, concurrency))

    return Engine("peer", run, process_group)


def in_process_engine(name: str, batches: Batches) -> Engine:
    """Returns an engine for a model of transformers in this process."""

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        return Observed(await asyncio.to_thread(batches.run, trace, concurrency))

    return Engine(name, run)


@contextmanager
def all_stopped(engines: Sequence[Engine]) -> Iterator[None]:
    """Stops the processes of `engines` for the time of the block."""
    with ExitStack() as stack:
        for engine in engines:
            if engine.process_group is not None:
                os.killpg(engine.process_group, signal.SIGSTOP)
                stack.callback(os.killpg, engine.process_group, signal.SIGCONT)
        yield
