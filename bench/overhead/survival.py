"""Streams of all kinds while the scheduler is killed and stopped again and again: are all of their answers right?

    python -m bench survival                             # 64 streams, 20 SIGKILL and 5 SIGSTOP, under `quire serve`
    python -m bench survival --streams 16 --kills 3 --stops 0 --json FILE

Every request runs undisturbed first. Then as many clients as there are streams send these requests in turn, until the
last disturbance is over, and each answer is compared with the undisturbed one: tokens, text, reasons, usage and
log-probabilities. A stopped scheduler answers nothing; `quire serve` kills it after --step-timeout-s. The longest
silence is the longest time between two events of one stream, or from its request to its first event. Exit status 1:
a request failed, or an answer differs.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from bench.command_line import BenchError, Parser, at_least
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


@dataclass(slots=True)
class Survival:
    """The answers and errors that the clients received.

    num_served         answers that are equal to the undisturbed ones, by kind
    failures           requests that failed, by error
    wrong              a line for each difference of an answer
    num_resumptions    streams that went on with another scheduler
    longest_silence_s  by the last signal before its end, apart for beams, which begin again after each break
    """

    num_served: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_resumptions: int = 0
    longest_silence_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.failures and not self.wrong

    def as_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Load:
    """Clients that send the requests in turn, and compare the answers."""

    def __init__(self, client: AsyncClient, all_jobs: Sequence[Job], expected: Sequence[Completion]) -> None:
        self._client = client
        self._turns = cycle(list(zip(all_jobs, expected, strict=True)))
        self.survival = Survival()
        self.num_events = 0
        self.is_ending = False
        self.disturbance = ""

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
        """Keeps the longest one. Beams have their own: they send nothing before the search is over."""
        name = (self.disturbance or "undisturbed") + (", beams" if kind == "beams" else "")
        longest = self.survival.longest_silence_s
        longest[name] = max(longest.get(name, 0.0), silence_s)


async def disturb(serve: psutil.Process, load: Load, signals: Sequence[signal.Signals], rng: random.Random) -> None:
    """Sends the signals to the scheduler, each after the streams have gone on for a random while."""
    for count, number in enumerate(signals, start=1):
        scheduler = child(serve, "scheduler")
        await _events(load, rng.randrange(100, 4000))
        load.disturbance = number.name
        scheduler.send_signal(number)
        sent_s = time.perf_counter()
        while not _has_successor(serve, scheduler.pid):  # noqa: ASYNC110 - nothing announces a new process
            await asyncio.sleep(_POLL_S)
        await _events(load, 100)
        print(f"{count:>3}  {number.name}  tokens again after {time.perf_counter() - sent_s:.2f} s", flush=True)
    await _events(load, 1000)


def _has_successor(serve: psutil.Process, pid: int) -> bool:
    try:
        return child(serve, "scheduler").pid != pid
    except (RecoveryError, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


async def _events(load: Load, number: int) -> None:
    """Waits until the streams have received this many further events. Raises BenchError if requests fail."""
    goal = load.num_events + number
    while load.num_events < goal:
        await asyncio.sleep(_POLL_S)
        if sum(load.survival.failures.values()) > _MAX_SHOWN:
            raise BenchError(f"too many requests fail: {dict(load.survival.failures)}")


async def measure(
    num_streams: int, num_tokens: int, signals: Sequence[signal.Signals], seed: int, step_timeout_s: float
) -> Survival:
    """Runs the services, the load and the disturbances. Raises BenchError and QuireError."""
    flags = [*service_flags(step_timeout_s), "--max-num-seqs", str(4 * num_streams), "--num-blocks", "4096"]
    async with child_process("quire", "serve", *flags) as server, AsyncClient(server.addresses["grpc"]) as client:
        all_jobs = jobs(num_streams, num_tokens, seed)
        expected = await asyncio.gather(*[client.complete(job.prompt, **job.options) for job in all_jobs])
        print(f"{num_streams} streams; the undisturbed answers are known", flush=True)
        load = Load(client, all_jobs, [comparable(each) for each in expected])
        async with asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(load.run())
            await disturb(psutil.Process(server.pid), load, signals, random.Random(seed))
            load.is_ending = True
        load.survival.num_resumptions = client.num_resumptions
        return load.survival


def lines(survival: Survival) -> Iterator[str]:
    """Yields the result as text."""
    yield f"requests served     {survival.num_served.total()} of {len(survival.num_served)} kinds"
    yield f"requests failed     {survival.failures.total()}"
    yield f"answers that differ {len(survival.wrong)}"
    yield f"streams continued   {survival.num_resumptions}"
    for name, silence_s in sorted(survival.longest_silence_s.items()):
        yield f"longest silence     {silence_s:.2f} s ({name})"
    yield from [f"failed: {what} ({count})" for what, count in survival.failures.most_common(_MAX_SHOWN)]
    yield from [f"differs: {what}" for what in survival.wrong[:_MAX_SHOWN]]


def main(arguments: Sequence[str]) -> int:
    parser = Parser("survival", __doc__)
    parser.add_argument("--streams", type=at_least(1), default=64, help="number of streams at one time")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="tokens of a sequence, about")
    parser.add_argument("--kills", type=at_least(0), default=20, help="how often the scheduler gets SIGKILL")
    parser.add_argument("--stops", type=at_least(0), default=5, help="how often it gets SIGSTOP")
    parser.add_argument("--seed", type=int, default=0, help="chooses requests and times")
    parser.add_argument("--step-timeout-s", type=float, default=4.0, help="step timeout of `quire serve`")
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    signals = [signal.SIGKILL] * given.kills + [signal.SIGSTOP] * given.stops
    random.Random(given.seed).shuffle(signals)
    survival = asyncio.run(measure(given.streams, given.tokens, signals, given.seed, given.step_timeout_s))
    print(*lines(survival), sep="\n")
    if given.json is not None:
        settings = {name: value for name, value in vars(given).items() if name != "json"}
        save(given.json, {"settings": settings, "machine": describe_machine(None), "survival": survival.as_json()})
    return 0 if survival.is_complete else 1
