"""Streams of all kinds while services are killed and stopped again and again: are all of their answers right?

    python -m bench survival                             # 64 streams, 800 requests for each fault, under `quire serve`
    python -m bench survival --streams 16 --requests 80 --kills 2 --stops 1 --json FILE
    python -m bench survival --faults scheduler-SIGKILL scheduler-SIGSTOP

Every request runs undisturbed first. Then, for one fault after the other, as many clients as there are streams send
these requests in turn, while the signals of the fault are spread over the requests. Each answer is compared with the
undisturbed one: tokens, text, reasons, usage and log-probabilities. A stopped service answers nothing; `quire serve`
kills it after --step-timeout-s. A silence is the time between two events of one stream, or from its request to its
first event; beams send nothing before their search is over, and begin again when the scheduler dies. Exit status 1: a
request failed, or an answer differs.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from bench.command_line import BenchError, Parser, at_least, open_console
from bench.machine import describe_machine
from bench.overhead.recovery import RecoveryError, child, service_flags
from bench.overhead.survival_jobs import Job, comparable, differences, jobs
from bench.report import save
from bench.server_process import child_process
from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.events import Completion
from quire.messages import CompletionAssembler

_POLL_S = 0.02
_MAX_SHOWN = 20
_BEAMS = "beams"


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal, and the services that receive it at the same time."""

    services: tuple[str, ...]
    number: signal.Signals


FAULTS = {
    "executor-SIGKILL": Fault(("executor",), signal.SIGKILL),
    "executor-SIGSTOP": Fault(("executor",), signal.SIGSTOP),
    "scheduler-SIGKILL": Fault(("scheduler",), signal.SIGKILL),
    "scheduler-SIGSTOP": Fault(("scheduler",), signal.SIGSTOP),
    "both-SIGKILL": Fault(("scheduler", "executor"), signal.SIGKILL),
}


@dataclass(slots=True)
class Survival:
    """The answers and errors that the clients received under one fault.

    num_served               answers that are equal to the undisturbed ones, by kind
    num_differing            answers that are not
    failures                 requests that failed, by error
    wrong                    a line for each difference of an answer
    num_signals              how often the fault occurred
    num_resumptions          streams that went on with another scheduler
    longest_silence_s        of all kinds but beams
    longest_beam_silence_s
    longest_pause_s          from a signal until the streams together had 100 events from the successor
    """

    num_served: Counter[str] = field(default_factory=Counter)
    num_differing: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_signals: int = 0
    num_resumptions: int = 0
    longest_silence_s: float = 0.0
    longest_beam_silence_s: float = 0.0
    longest_pause_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.num_served.total() + self.num_differing + self.failures.total()

    @property
    def is_complete(self) -> bool:
        return not self.failures and not self.num_differing

    def as_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"num_requests": self.num_requests}


class Load:
    """Clients that send the requests in turn, and compare the answers."""

    def __init__(self, client: AsyncClient, all_jobs: Sequence[Job] = (), expected: Sequence[Completion] = ()) -> None:
        self._client = client
        self._turns = cycle(list(zip(all_jobs, expected, strict=True)))
        self.survival = Survival()
        self.num_events = 0
        self.is_ending = False

    async def run(self) -> None:
        """Runs one client until `is_ending` is set."""
        while not self.is_ending:
            job, expected = next(self._turns)
            try:
                actual = comparable(await self.complete(job))
            except QuireError as error:
                self.survival.failures[f"{job.kind}: {type(error).__name__}: {error}"] += 1
                continue
            wrong = [f"{job.kind}: {line}" for line in differences(actual, expected)]
            self.survival.wrong += wrong
            self.survival.num_differing += bool(wrong)
            self.survival.num_served[job.kind] += not wrong

    async def complete(self, job: Job) -> Completion:
        assembler = CompletionAssembler()
        last_s = time.perf_counter()
        async with self._client.generate(job.prompt, **job.options) as events:
            async for event in events:
                now_s = time.perf_counter()
                self._note_silence(job.kind, now_s - last_s)
                last_s = now_s
                self.num_events += 1
                assembler.add(event)
        return assembler.completion()

    def _note_silence(self, kind: str, silence_s: float) -> None:
        survival = self.survival
        if kind == _BEAMS:
            survival.longest_beam_silence_s = max(survival.longest_beam_silence_s, silence_s)
        else:
            survival.longest_silence_s = max(survival.longest_silence_s, silence_s)

    async def until_requests(self, number: float) -> None:
        """Waits until this many requests have ended."""
        await self.until(lambda: self.survival.num_requests >= number)

    async def until_events(self, number: int) -> None:
        await self.until(lambda: self.num_events >= number)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds. Raises BenchError if many requests fail."""
        while not condition():
            await asyncio.sleep(_POLL_S)
            if sum(self.survival.failures.values()) > _MAX_SHOWN:
                raise BenchError(f"too many requests fail: {dict(self.survival.failures)}")


async def disturb(
    serve: psutil.Process, load: Load, fault: Fault, num_signals: int, num_requests: int, rng: random.Random
) -> None:
    """Sends the signals, each at a random place of its part of the requests, and waits for the end of them all."""
    survival = load.survival
    for count in range(num_signals):
        await load.until_requests((count + rng.random()) * num_requests / num_signals)
        processes = [child(serve, service) for service in fault.services]
        for process in processes:
            process.send_signal(fault.number)
        sent_s = time.perf_counter()
        pids = {process.pid for process in processes}
        await load.until(partial(_have_successors, serve, fault.services, pids))
        await load.until_events(load.num_events + 100)
        pause_s = time.perf_counter() - sent_s
        survival.num_signals += 1
        survival.longest_pause_s = max(survival.longest_pause_s, pause_s)
        print(f"  {count + 1:>3}  tokens again after {pause_s:.2f} s", flush=True)
    await load.until_requests(num_requests)


def _have_successors(serve: psutil.Process, services: Sequence[str], pids: set[int]) -> bool:
    try:
        return not pids & {child(serve, service).pid for service in services}
    except (RecoveryError, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@dataclass(frozen=True, slots=True)
class Extent:
    """Says how much is measured: streams at one time, tokens of a sequence, requests and signals for each fault."""

    num_streams: int
    num_tokens: int
    num_requests: int
    num_kills: int
    num_stops: int

    def num_signals(self, fault: Fault) -> int:
        return self.num_kills if fault.number is signal.SIGKILL else self.num_stops


async def measure(extent: Extent, faults: Mapping[str, Fault], seed: int, step_timeout_s: float) -> dict[str, Survival]:
    """Runs the services and the load, and returns what survived each fault. Raises BenchError and QuireError."""
    num_streams, rng = extent.num_streams, random.Random(seed)
    flags = [*service_flags(step_timeout_s), "--max-num-seqs", str(4 * num_streams), "--num-blocks", "4096"]
    async with child_process("quire", "serve", *flags) as server, AsyncClient(server.addresses["grpc"]) as client:
        serve, all_jobs = psutil.Process(server.pid), jobs(num_streams, extent.num_tokens, seed)
        undisturbed = Load(client)
        expected = await asyncio.gather(*[undisturbed.complete(job) for job in all_jobs])
        undisturbed.survival.num_served.update(job.kind for job in all_jobs)
        survivals = {"undisturbed": undisturbed.survival}
        print(f"{num_streams} streams; the undisturbed answers are known", flush=True)
        for name, fault in faults.items():
            print(name, flush=True)
            load = Load(client, all_jobs, [comparable(each) for each in expected])
            before = client.num_resumptions
            async with asyncio.TaskGroup() as group:
                for _ in range(num_streams):
                    group.create_task(load.run())
                await disturb(serve, load, fault, extent.num_signals(fault), extent.num_requests, rng)
                load.is_ending = True
            load.survival.num_resumptions = client.num_resumptions - before
            survivals[name] = load.survival
    return survivals


def table(survivals: Mapping[str, Survival]) -> Table:
    """Returns a row for each fault."""
    shown = Table()
    shown.add_column("fault")
    for name in (
        "signals", "requests", "failed", "differ", "continued", "longest silence", "of beams", "longest pause",
    ):  # fmt: skip
        shown.add_column(name, justify="right")
    for name, each in survivals.items():
        counts = (each.num_signals, each.num_requests, each.failures.total(), each.num_differing, each.num_resumptions)
        times_s = (each.longest_silence_s, each.longest_beam_silence_s, each.longest_pause_s)
        shown.add_row(name, *map(str, counts), *(f"{time_s:.1f} s" for time_s in times_s))
    return shown


def complaints(survivals: Mapping[str, Survival]) -> Iterator[str]:
    """Yields a line for each kind of failure and for each difference."""
    for name, each in survivals.items():
        yield from [f"{name}: failed: {what} ({count})" for what, count in each.failures.most_common(_MAX_SHOWN)]
        yield from [f"{name}: differs: {what}" for what in each.wrong[:_MAX_SHOWN]]


def main(arguments: Sequence[str]) -> int:
    parser = Parser("survival", __doc__)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="which, in this order")
    parser.add_argument("--streams", type=at_least(1), default=64, help="number of streams at one time")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="tokens of a sequence, about")
    parser.add_argument("--requests", type=at_least(1), default=800, help="requests for each fault, at least")
    parser.add_argument("--kills", type=at_least(1), default=20, help="how often a service gets SIGKILL")
    parser.add_argument("--stops", type=at_least(1), default=5, help="how often a service gets SIGSTOP")
    parser.add_argument("--seed", type=int, default=0, help="chooses requests and times")
    parser.add_argument("--step-timeout-s", type=float, default=4.0, help="step timeout of `quire serve`")
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    extent = Extent(given.streams, given.tokens, given.requests, given.kills, given.stops)
    faults = {name: FAULTS[name] for name in given.faults}
    survivals = asyncio.run(measure(extent, faults, given.seed, given.step_timeout_s))
    open_console().print(table(survivals))
    print(*complaints(survivals), sep="\n")
    if given.json is not None:
        settings = {name: value for name, value in vars(given).items() if name != "json"}
        results = {name: survival.as_json() for name, survival in survivals.items()}
        save(given.json, {"settings": settings, "machine": describe_machine(None), "survival": results})
    return 0 if all(survival.is_complete for survival in survivals.values()) else 1
