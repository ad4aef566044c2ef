"""`quire bench serve`: one trace for each concurrency, through each engine that takes part, in one run.

Engines run one after the other, never at once, and see the same requests in the same order.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from bench.load import LoadError, LoadResult, Send, closed_loop, quire_sender
from bench.openai_peer import peer_process, peer_sender, peer_session
from bench.pool_sampler import PoolSampler, PoolStats
from bench.report import RunSummary, render_table, report, summarize
from bench.static_baseline import StaticBatches
from bench.step_traces import StepRecorder, save_chrome_trace
from bench.trace import TraceRequest, TraceSettings, describe, make_trace
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace

_MIN_REQUESTS = 12
_REQUESTS_PER_CLIENT = 4
_NUM_WARMUP_REQUESTS = 2
_WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Peer:
    """An OpenAI-compatible server to compare with.

    url      its root
    model    the name it serves the model by
    command  starts it when its turn comes, and is ended afterwards, so that two servers never share the machine;
             empty: it runs already
    """

    url: str
    model: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure.

    address         of a running Quire server (gRPC)
    concurrencies   numbers of clients, one run each
    num_requests    of each run; None: four for each client, at least twelve
    seed            of the traces; each concurrency draws its own, so that no run finds the last one's prefixes cached
    lengths         of prompts and outputs: a name of `bench.trace.LENGTHS`
    peer            another server to send the same traces to
    chrome_trace    where Quire's steps go, one file a concurrency (NAME-cN.json); None: nowhere
    rest_s          for so long a server that was started for this is left alone once it is ready, whichever it is: what
                    it still has to do, such as taking memory from the system, is not what is measured
    baseline_model  model directory for the static-batch baseline in this process; None: no baseline
    """

    address: str
    concurrencies: tuple[int, ...]
    num_requests: int | None = None
    seed: int = 7
    num_shared_tokens: int = 0
    lengths: str = "mixed"
    peer: Peer | None = None
    baseline_model: str | None = None
    chrome_trace: Path | None = None
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What the clients saw of a run, and, where the engine lets us look inside, what happened there."""

    load: LoadResult
    pool: PoolStats | None = None
    steps: tuple[StepTrace, ...] = ()


# Runs a trace with so many clients.
Engine: TypeAlias = Callable[[Sequence[TraceRequest], int], Awaitable[Observed]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What Quire served and which traces it got: the others get the same."""

    info: ServerInfo
    traces: dict[int, TraceSettings]


async def measure_quire(settings: BenchSettings, console: Console) -> tuple[Subject, list[RunSummary]]:
    """Runs every trace through the server at settings.address. Raises LoadError and QuireError."""
    async with AsyncClient(settings.address) as client:
        info = await client.server_info()
        subject = Subject(info, {c: trace_settings(settings, info, c) for c in settings.concurrencies})
        return subject, await _run_all("quire", quire_engine(client), settings, subject, console)


async def measure_others(settings: BenchSettings, subject: Subject, console: Console) -> list[RunSummary]:
    """Runs the same traces through whatever else takes part. Raises LoadError."""
    runs: list[RunSummary] = []
    if settings.peer is not None:
        async with AsyncExitStack() as resources:
            if settings.peer.command:
                with console.status("starting the peer"):
                    await resources.enter_async_context(peer_process(settings.peer.command, settings.peer.url))
                    await asyncio.sleep(settings.rest_s)
            session = await resources.enter_async_context(peer_session())
            engine = server_engine(peer_sender(session, settings.peer.url, settings.peer.model))
            runs += await _run_all("peer", engine, settings, subject, console)
    if settings.baseline_model is not None:
        with console.status("loading the baseline"):
            batches = StaticBatches(settings.baseline_model, subject.info.dtype)
        if batches.vocab_size != subject.info.vocab_size:
            raise LoadError(f"{settings.baseline_model} is not the model that the server serves")
        runs += await _run_all("transformers", static_engine(batches), settings, subject, console)
    return runs


def finish(subject: Subject, runs: Sequence[RunSummary], console: Console) -> dict[str, Any]:
    """Prints the table and returns the report."""
    console.print(render_table(runs))
    described = [{"concurrency": c} | describe(drawn, make_trace(drawn)) for c, drawn in subject.traces.items()]
    return report(runs, asdict(subject.info), described)


async def _run_all(
    name: str, run: Engine, settings: BenchSettings, subject: Subject, console: Console
) -> list[RunSummary]:
    await run(warmup_trace(settings, subject.info), 1)
    runs = []
    for concurrency, drawn in subject.traces.items():
        with console.status(f"{name}: {drawn.num_requests} requests of {concurrency} clients"):
            observed = await run(make_trace(drawn), concurrency)
        runs.append(summarize(name, observed.load, observed.pool, observed.steps))
        if settings.chrome_trace is not None and observed.steps:
            path = settings.chrome_trace
            save_chrome_trace(path.with_stem(f"{path.stem}-c{concurrency}"), observed.steps)
        console.print(_progress(runs[-1]))
    return runs


def _progress(run: RunSummary) -> str:
    idle = run.executor_idle_ratio
    return f"{run.engine} c={run.concurrency}: {run.output_tokens_per_s:.1f} output tokens/s" + (
        "" if idle is None else f", executor idle {idle:.1%}"
    )


def trace_settings(settings: BenchSettings, info: ServerInfo, concurrency: int) -> TraceSettings:
    """The trace of one run: nothing in it is longer than the model or the pool can hold."""
    default_num = max(_MIN_REQUESTS, _REQUESTS_PER_CLIENT * concurrency)
    return TraceSettings(
        num_requests=settings.num_requests or default_num,
        vocab_size=info.vocab_size,
        max_model_len=min(info.max_model_len, info.num_blocks * info.block_size),
        seed=settings.seed * 1_000_003 + concurrency,
        num_shared_tokens=settings.num_shared_tokens,
        lengths=settings.lengths,
    )


def warmup_trace(settings: BenchSettings, info: ServerInfo) -> list[TraceRequest]:
    """A few short requests that no run contains: the first ones pay for compiling and for first touches."""
    drawn = replace(trace_settings(settings, info, 0), num_requests=_NUM_WARMUP_REQUESTS)
    return [replace(request, max_tokens=min(request.max_tokens, _WARMUP_TOKENS)) for request in make_trace(drawn)]


def quire_engine(client: AsyncClient) -> Engine:
    """A Quire server."""
    send = quire_sender(client)

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        await client.reset_prefix_cache()  # an earlier measurement may have left the same prompts
        async with StepRecorder(client) as recorder, PoolSampler(client) as sampler:
            result = await closed_loop(send, trace, concurrency)
        return Observed(result, sampler.stats, recorder.steps)

    return run


def server_engine(send: Send) -> Engine:
    """Any other one."""

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        return Observed(await closed_loop(send, trace, concurrency))

    return run


def static_engine(batches: StaticBatches) -> Engine:
    """Static batches in this process."""

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        return Observed(await asyncio.to_thread(batches.run, trace, concurrency))

    return run
