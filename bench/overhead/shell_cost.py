"""The cost of a streamed token in the whole scheduler process: plans, results, text, metrics and gRPC to many clients.

    python -m bench shell-cost                       # 1, 16, 64, 256 and 512 clients, steps as fast as possible
    python -m bench shell-cost --step-ms 5 1 16      # steps of 5 ms: how many messages carry more than one token?
    python -m bench shell-cost --calls 2 256 512     # the clients share two calls of GenerateMany

    this process, core B:   clients, one connection each ◄──── quire.v1 ────┐
    a process, core B:      null executor ◄── quire.executor.v1 ── SCHEDULER, a process on core A, as users run it

Clients and executor share a core, which may be busier than the scheduler's. So there are two figures: tokens per
second of wall time, and per second of the scheduler's own CPU time (user and system, all threads). The second one is
what one core could stream if nothing else were slow. Both cover the time in which every client is active: from the
first message of the last client to start until the first client has finished its requests. A client sends its requests
one after the other.
"""

import asyncio
import os
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from bench.command_line import Parser
from bench.overhead.many_load import run_in_calls
from bench.overhead.stream_load import Clients, Delta, Load, Period
from bench.report import save
from bench.server_process import child_process
from bench.step_traces import StepRecorder, idle_ratio
from quire.async_client import AsyncClient
from quire.model_path import embedded_model

_MIN_REQUESTS = 2
_MIN_TOKENS = 4000
"""Tokens of a run: with few clients, each sends more requests."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures for the time in which all clients were active. Gaps are between two Deltas of a stream.

    num_checked_tokens   tokens of the whole run
    mean_num_streams     mean number of open streams; the other clients' requests were on their way
    executor_idle_ratio  idle ratio in the whole run; None if steps take no time
    """

    num_clients: int
    num_checked_tokens: int
    mean_num_streams: float
    num_tokens: int
    wall_s: float
    scheduler_cpu_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    num_deltas: int
    deltas_per_s: float
    tokens_per_delta: float
    num_coalesced_deltas: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    executor_idle_ratio: float | None


@dataclass(frozen=True, slots=True)
class Services:
    """The command lines of both services, after `python -m`.

    executor  None: a null executor
    cores     cores to choose from; None: those of this process
    """

    scheduler: tuple[str, ...] = ("quire", "scheduler", "--log-level", "warning")
    executor: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None


_SERVICES = Services()


class Harness:
    """A scheduler with an executor, and its clients. `http_address` is the scheduler's."""

    def __init__(
        self, scheduler: psutil.Process, addresses: dict[str, str], tokenizer: Tokenizer, step_ms: float
    ) -> None:
        self._scheduler = scheduler
        self._address = addresses["grpc"]
        self.http_address = addresses["http"]
        self._clients = Clients(self._address, tokenizer)
        self._step_ms = step_ms

    async def measure(self, load: Load, num_calls: int = 0) -> Cost:
        """Raises ShellCostError if a stream is not correct.

        num_calls  calls of GenerateMany that the clients share; 0: each request is a call of Generate
        """
        period = Period(self._scheduler, load.num_clients)
        async with AsyncClient(self._address) as admin:
            async with StepRecorder(admin) as recorder:
                if num_calls:
                    streams = await run_in_calls(self._clients, num_calls, load, period)
                else:
                    streams = await self._clients.run(load, period)
        return _cost(load, period, streams, idle_ratio(recorder.steps) if self._step_ms else None)


def _cost(load: Load, period: Period, streams: Sequence[Sequence[Delta]], executor_idle_ratio: float | None) -> Cost:
    deltas = [delta for stream in streams for delta in stream if period.includes(delta.time_s)]
    gaps_ms = [
        1e3 * (after.time_s - before.time_s)
        for stream in streams
        for before, after in pairwise(stream)
        if period.includes(before.time_s) and period.includes(after.time_s)
    ]
    percentiles = statistics.quantiles(gaps_ms, n=100) if len(gaps_ms) > 1 else [0.0] * 99
    num_tokens = sum(delta.num_tokens for delta in deltas)
    return Cost(
        num_clients=load.num_clients,
        num_checked_tokens=sum(delta.num_tokens for stream in streams for delta in stream),
        mean_num_streams=sum(map(period.overlap_s, streams)) / period.wall_s,
        num_tokens=num_tokens,
        wall_s=period.wall_s,
        scheduler_cpu_s=period.cpu_s,
        tokens_per_s=num_tokens / period.wall_s,
        tokens_per_cpu_s=num_tokens / max(period.cpu_s, 1e-9),
        num_deltas=len(deltas),
        deltas_per_s=len(deltas) / period.wall_s,
        tokens_per_delta=num_tokens / max(1, len(deltas)),
        num_coalesced_deltas=sum(delta.num_tokens > 1 for delta in deltas),
        gap_p50_ms=percentiles[49],
        gap_p99_ms=percentiles[98],
        gap_max_ms=max(gaps_ms, default=0.0),
        executor_idle_ratio=executor_idle_ratio,
    )


@asynccontextmanager
async def harness(step_ms: float = 0.0, services: Services = _SERVICES) -> AsyncIterator[Harness]:
    """Starts an executor and a scheduler, each on its own core if there are two. Raises ServerFailed."""
    directory = embedded_model()
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    cores = services.cores or sorted(os.sched_getaffinity(0))
    null = ("bench.overhead.null_executor", "--vocab-size", str(tokenizer.get_vocab_size()), "--step-ms", str(step_ms))
    async with AsyncExitStack() as running:
        running.enter_context(_pinned(cores[-1]))
        executor = await running.enter_async_context(child_process(*(services.executor or null)))
        address = executor.line.split()[-1]
        with _pinned(cores[0]):
            scheduler = await running.enter_async_context(
                child_process(*services.scheduler, *_scheduler_flags(directory, address))
            )
        yield Harness(psutil.Process(scheduler.pid), scheduler.addresses, tokenizer, step_ms)


def _scheduler_flags(model: str, executor_address: str) -> list[str]:
    addresses = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--executor", executor_address]
    return ["--model", model, *addresses]


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Pins this process, and children that it starts during the context, to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def table(costs: Sequence[Cost]) -> str:
    """Returns a table with a line for each number of clients."""
    lines = [
        f"{'clients':>7} {'streams':>7} {'tokens/s':>9} {'tokens/CPU s':>12} {'deltas/s':>10} {'tokens/delta':>12} "
        f"{'gap p50':>8} {'p99':>8} {'max ms':>8} {'executor idle':>13}"
    ]
    for cost in costs:
        idle = "-" if cost.executor_idle_ratio is None else f"{cost.executor_idle_ratio:.1%}"
        lines.append(
            f"{cost.num_clients:>7} {cost.mean_num_streams:>7.0f} "
            f"{cost.tokens_per_s:>9.0f} {cost.tokens_per_cpu_s:>12.0f} "
            f"{cost.deltas_per_s:>10.0f} {cost.tokens_per_delta:>12.2f} "
            f"{cost.gap_p50_ms:>8.1f} {cost.gap_p99_ms:>8.1f} {cost.gap_max_ms:>8.1f} {idle:>13}"
        )
    return "\n".join(lines)


async def measure(clients: Sequence[int], num_tokens: int, step_ms: float = 0.0, num_calls: int = 0) -> list[Cost]:
    """Measures each number of clients, after a run that is not counted. Raises ShellCostError and ServerFailed."""
    async with harness(step_ms) as running:
        await running.measure(Load(min(clients), num_tokens=num_tokens, num_requests=1), num_calls)
        loads = [
            Load(number, num_tokens, max(_MIN_REQUESTS, _MIN_TOKENS // (number * num_tokens))) for number in clients
        ]
        return [await running.measure(load, num_calls) for load in loads]


def main(arguments: Sequence[str]) -> None:
    parser = Parser("shell-cost", __doc__)
    parser.add_argument("clients", type=int, nargs="*", default=[1, 16, 64, 256, 512], help="numbers of clients")
    parser.add_argument("--num-tokens", type=int, default=500, help="tokens of output of each request")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that the executor takes for a step")
    parser.add_argument(
        "--calls", type=int, default=0, help="calls of GenerateMany that the clients share; 0: a call for each request"
    )
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    costs = asyncio.run(measure(given.clients, given.num_tokens, given.step_ms, given.calls))
    print(table(costs))
    if given.json is not None:
        save(given.json, [asdict(cost) for cost in costs])
