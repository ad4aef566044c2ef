"""What a streamed token costs the whole scheduler process: plans, results, text, metrics and gRPC to many clients.

    python -m bench.shell_cost                       # 1, 16, 64, 256 and 512 clients, steps as fast as they are taken
    python -m bench.shell_cost --step-ms 5 1 16      # steps of 5 ms: how many messages carry more than one token?

    this process, core B:   clients, one connection each ◄──── quire.v1 ────┐
    a process, core B:      bench.null_executor ◄── quire.executor.v1 ── SCHEDULER, a process on core A, as users run it

Clients and executor share a core, which may be busier than the scheduler's. So there are two figures: tokens per second
of wall time, and per second of the scheduler's own CPU time (user and system, all threads), which is what one core
could stream if nothing else were slow. Both are of the time in which every client is at work: from when the last one
got its first message until the first one is done with its requests, which it sends one after the other.

Clients keep the bytes that they get and read them when the clock has stopped; then every stream is checked: tokens
counted, and text compared with what the tokenizer makes of them all.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeAlias

import grpc.aio
import psutil
from tokenizers import Tokenizer

from bench.step_traces import StepRecorder, idle_ratio
from quire.async_client import AsyncClient
from quire.v1 import generation_pb2 as pb

MODEL = Path(__file__).parents[1] / "models" / "tiny"
METHOD = "/quire.v1.Generation/Generate"
PROMPT_TOKENS = 16
MIN_REQUESTS = 2
MIN_TOKENS = 4000
"""Of a client's requests, and of a run: few clients send more requests one after the other."""

Call: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


class ShellCostError(Exception):
    """A measurement that cannot be made, or whose streams were not what they have to be."""


@dataclass(frozen=True, slots=True)
class Load:
    """num_tokens of output a request; num_requests of each client, one after the other, once all clients are at work.

    Until then each sends requests that do not count.
    """

    num_clients: int
    num_tokens: int
    num_requests: int


@dataclass(slots=True)
class Received:
    """One request's stream, as it came: serialised GenerateResponses, and when each arrived."""

    messages: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is left of one when it has been checked."""

    num_tokens: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the time in which all clients were at work. Gaps are between two Deltas of a stream.

    num_checked_tokens   of the whole run
    mean_num_streams     clients whose stream had begun and not ended; the others' requests were on their way
    executor_idle_ratio  of the whole run; None where steps take no time
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
    """How both are started: words after `python -m`. executor None: a null one. cores None: those of this process."""

    scheduler: tuple[str, ...] = ("quire", "scheduler", "--log-level", "warning")
    executor: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None


SERVICES = Services()


class Rig:
    """A scheduler with an executor, and the clients' side of it. `http_address` is the scheduler's."""

    def __init__(
        self, scheduler: psutil.Process, address: str, http_address: str, tokenizer: Tokenizer, step_ms: float
    ) -> None:
        self._scheduler = scheduler
        self._address = address
        self.http_address = http_address
        self._tokenizer = tokenizer
        self._step_ms = step_ms
        self._num_prompts = 0

    async def measure(self, load: Load) -> Cost:
        """Raises ShellCostError if a stream does not carry what was asked for."""
        period = Period(self._scheduler, load.num_clients)
        async with AsyncClient(self._address) as admin, _channels(self._address, load.num_clients) as channels:
            async with StepRecorder(admin) as recorder:
                clients = await asyncio.gather(*[self._be_client(channel, load, period) for channel in channels])
        streams = [self._check(received, load.num_tokens) for client in clients for received in client]
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
            executor_idle_ratio=idle_ratio(recorder.steps) if self._step_ms else None,
        )

    async def _be_client(self, channel: grpc.aio.Channel, load: Load, period: "Period") -> list[Received]:
        call: Call = channel.unary_stream(METHOD)  # bytes in, bytes out
        client: list[Received] = []
        num_left = load.num_requests
        while num_left:
            num_left -= period.is_on
            received = Received()
            client.append(received)
            async for message in call(self._request(load.num_tokens)):
                received.messages.append(message)
                received.times_s.append(time.perf_counter())
                if len(client) == len(received.messages) == 1:
                    period.has_begun()
        period.has_ended()
        return client

    def _request(self, num_tokens: int) -> bytes:
        """Prompts differ from the first token on: none finds another's prefix."""
        self._num_prompts += 1
        vocab_size = self._tokenizer.get_vocab_size()
        ids = [(self._num_prompts // vocab_size**i) % vocab_size for i in range(PROMPT_TOKENS)]
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            stopping=pb.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        ).SerializeToString()

    def _check(self, received: Received, num_tokens: int) -> list[Delta]:
        """The Deltas of a stream that is whole."""
        events = [pb.GenerateResponse.FromString(message) for message in received.messages]
        deltas = [
            (event.delta, time_s)
            for event, time_s in zip(events, received.times_s, strict=True)
            if event.HasField("delta")
        ]
        token_ids = [token_id for delta, _ in deltas for token_id in delta.token_ids]
        counts = (len(token_ids), events[-1].finished.usage.completion_tokens)
        if counts != (num_tokens, num_tokens):
            raise ShellCostError(f"{num_tokens} tokens were asked for, {counts} came")
        if "".join(delta.text for delta, _ in deltas) != self._tokenizer.decode(token_ids):
            raise ShellCostError("the text is not that of the token ids")
        return [Delta(len(delta.token_ids), time_s) for delta, time_s in deltas]


class Period:
    """The time in which all clients are at work, and the scheduler's CPU time in it."""

    def __init__(self, scheduler: psutil.Process, num_clients: int) -> None:
        self._scheduler = scheduler
        self._num_to_begin = num_clients
        self._has_ended = False
        self._begin = self._end = (0.0, 0.0)

    def has_begun(self) -> None:
        """A client has got its first message."""
        self._num_to_begin -= 1
        if self._num_to_begin == 0:
            self._begin = self._now()

    def has_ended(self) -> None:
        """A client has got its last message."""
        if not self._has_ended:
            self._has_ended = True
            self._end = self._now()

    @property
    def is_on(self) -> bool:
        """Whether all clients are at work, or were."""
        return self._num_to_begin == 0

    def includes(self, time_s: float) -> bool:
        return self._begin[0] < time_s <= self._end[0]

    def overlap_s(self, stream: Sequence[Delta]) -> float:
        """How much of it a stream took part in."""
        return max(0.0, min(stream[-1].time_s, self._end[0]) - max(stream[0].time_s, self._begin[0]))

    @property
    def wall_s(self) -> float:
        return self._end[0] - self._begin[0]

    @property
    def cpu_s(self) -> float:
        return self._end[1] - self._begin[1]

    def _now(self) -> tuple[float, float]:
        times = self._scheduler.cpu_times()
        return time.perf_counter(), times.user + times.system


@asynccontextmanager
async def _channels(address: str, num_clients: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Connected, each by a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_clients)]
    try:
        await asyncio.gather(*[channel.channel_ready() for channel in channels])
        yield channels
    finally:
        await asyncio.gather(*[channel.close() for channel in channels])


@asynccontextmanager
async def rig(step_ms: float = 0.0, model: Path = MODEL, services: Services = SERVICES) -> AsyncIterator[Rig]:
    """Starts an executor and a scheduler, each on its core where there are two. Raises ShellCostError.

    What they log is read, and thrown away.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cores = services.cores or sorted(os.sched_getaffinity(0))
    with _pinned(cores[-1]):
        null = ("bench.null_executor", "--vocab-size", str(tokenizer.get_vocab_size()), "--step-ms", str(step_ms))
        executor = _child(*null) if services.executor is None else _child(*services.executor, until="ready ")
        async with executor as (_, line):
            with _pinned(cores[0]):
                scheduler = _child(*services.scheduler, *_scheduler_arguments(model, line.split()[-1]), until="ready ")
                pid, line = await scheduler.__aenter__()
            try:
                addresses = dict(word.split("=", 1) for word in line.split()[1:])
                yield Rig(psutil.Process(pid), addresses["grpc"], addresses["http"], tokenizer, step_ms)
            finally:
                await scheduler.__aexit__(None, None, None)


def _scheduler_arguments(model: Path, executor_address: str) -> list[str]:
    addresses = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--executor", executor_address]
    return ["--model", str(model), *addresses]


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """This process, and the children started meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def _child(*arguments: str, until: str = "") -> AsyncIterator[tuple[int, str]]:
    """`python -m …`: its process id, and the first line that it prints and that begins with `until`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdout=pipe, stderr=pipe)
    last_words = asyncio.create_task(_read_away(process.stderr))
    try:
        yield process.pid, await _line(process.stdout, until) or await _fail(arguments, last_words)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await last_words


async def _line(output: asyncio.StreamReader | None, start: str) -> str:
    """The first one that begins so; "" if there is none."""
    while output is not None and (line := await output.readline()):
        if line.decode().startswith(start):
            return line.decode().strip()
    return ""


async def _fail(arguments: Sequence[str], last_words: asyncio.Task[str]) -> NoReturn:
    raise ShellCostError(f"{' '.join(arguments)} ended: {await last_words}")


async def _read_away(log: asyncio.StreamReader | None) -> str:
    """Returns the last lines, once it has ended."""
    lines: deque[bytes] = deque(maxlen=10)
    while log is not None and (line := await log.readline()):
        lines.append(line)
    return b"".join(lines).decode(errors="replace")


def table(costs: Sequence[Cost]) -> str:
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


async def measure(clients: Sequence[int], num_tokens: int, step_ms: float = 0.0) -> list[Cost]:
    """One run for each number of clients, after one that is not counted. Raises ShellCostError."""
    async with rig(step_ms) as bench:
        await bench.measure(Load(min(clients), num_tokens=num_tokens, num_requests=1))
        return [
            await bench.measure(Load(number, num_tokens, max(MIN_REQUESTS, MIN_TOKENS // (number * num_tokens))))
            for number in clients
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shell_cost")
    parser.add_argument("clients", type=int, nargs="*", default=[1, 16, 64, 256, 512])
    parser.add_argument("--num-tokens", type=int, default=500, help="output of each request")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what the executor takes for a step")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    arguments = parser.parse_args()
    costs = asyncio.run(measure(arguments.clients, arguments.num_tokens, arguments.step_ms))
    print(table(costs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
