"""Goodput under overload: requests with deadlines, of which far more arrive than the server can serve.

    python -m bench overload                # three times the capacity, which is measured first, in three rounds

The capacity is the output of clients that send one request after the other, in tokens a second; there are more of them
than slots, so that the batch is full. Then requests arrive at a constant rate, whatever becomes of the earlier ones.
Goodput is the output of the requests that end within their deadline: tokens of other requests are worth nothing.

The clients are a process of the lowest priority, so that the server is measured and not the cores. If other processes
take the rest of the cores, such clients read their messages late. The goodput is therefore also reported as the server
sees it: the requests that it ended within their deadline. All other flags are those of `quire serve`.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from bench.attacks.overload_clients import OUTPUT_TOKENS, WARM_UP_S, Tally, send_all, send_one_by_one
from bench.command_line import BenchError, Parser, at_least, open_console
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import Child, quire_server
from bench.step_traces import StepRecorder, idle_ratio
from quire.async_client import AsyncClient

_MAX_DURATION_S = 20.0
_MAX_REQUESTS = 20_000
_LOWEST_PRIORITY = 19
_SERVICES = ("scheduler", "executor")
_IN_TIME = "length"


@dataclass(frozen=True, slots=True)
class Phase:
    """The clients and the server in one measurement, after its warm-up.

    tally                what the clients received
    ended                requests that ended in the server, by reason, and whether they had output
    num_tokens           output of these requests, by the same
    steps_per_s          steps of the executor
    decodes_per_step     sequences that decode in a step
    step_ms              time that the device needs for a step
    executor_idle_ratio  share of the time in which the device has no step
    cores                processor seconds a second, by process
    """

    tally: Tally
    ended: dict[str, int]
    num_tokens: dict[str, int]
    steps_per_s: float
    decodes_per_step: float
    step_ms: float
    executor_idle_ratio: float
    cores: dict[str, float]

    @property
    def served_per_s(self) -> float:
        """Tokens a second of the requests that the server ended in time."""
        return self.num_tokens.get(_IN_TIME, 0) / self.tally.duration_s


@dataclass(frozen=True, slots=True)
class Round:
    """The capacity, and the goodput that follows it. The offered load is in tokens a second, too."""

    without: Phase
    under: Phase
    offered: float

    @property
    def goodput_ratio(self) -> float:
        """Goodput divided by capacity, as the clients see them."""
        return self.under.tally.tokens_per_s / self.without.tally.tokens_per_s

    @property
    def served_ratio(self) -> float:
        """Goodput divided by capacity, as the server sees them."""
        return self.under.served_per_s / self.without.served_per_s if self.without.served_per_s else 0.0


async def measure(
    flags: Sequence[str], *, times: float, num_clients: int, duration_s: float, deadline_s: float, num_rounds: int
) -> list[Round]:
    """Measures on one server in rounds. Raises BenchError if it has no capacity or the load is too large."""
    log = _Log()
    # Not forked, because gRPC does not survive a fork of a process that has used it.
    spawn, priority = multiprocessing.get_context("spawn"), (_LOWEST_PRIORITY,)
    with ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=priority) as pool:
        async with quire_server([*flags, "--log-format", "json"], log.add) as server:
            async with AsyncClient(server.addresses["grpc"]) as client:
                watch = _Watch(server, client, log, pool, duration_s)
                rounds: list[Round] = []
                for number in range(num_rounds):
                    rounds.append(await _round(watch, times, num_clients, deadline_s))
                    ratios = f"clients {rounds[-1].goodput_ratio:.1%}, server {rounds[-1].served_ratio:.1%}"
                    print(f"round {number + 1}: {ratios}", file=sys.stderr, flush=True)
                return rounds


async def _round(watch: "_Watch", times: float, num_clients: int, deadline_s: float) -> Round:
    without = await watch.phase(send_one_by_one, num_clients)
    capacity = without.tally.tokens_per_s
    if not capacity:
        raise BenchError("the server served no request without overload")
    rate = times * capacity / OUTPUT_TOKENS
    num_requests = int(rate * (WARM_UP_S + watch.duration_s))
    if num_requests > _MAX_REQUESTS:
        raise BenchError(f"{num_requests} requests are more than {_MAX_REQUESTS}: use a shorter --duration-s")
    return Round(without, await watch.phase(send_all, rate, deadline_s), rate * OUTPUT_TOKENS)


@dataclass(slots=True)
class _Log:
    """The requests that ended in the server, as its log reports them: (time, reason, output tokens)."""

    ends: list[tuple[float, str, int]] = field(default_factory=list)

    def add(self, line: str) -> None:
        if '"request ended"' in line:
            record = json.loads(line)
            self.ends.append((time.monotonic(), record["reason"], record["generated_tokens"]))


class _Watch:
    """Watches the processes and the steps of a server while clients run."""

    def __init__(self, server: Child, client: AsyncClient, log: _Log, pool: Executor, duration_s: float) -> None:
        self._server = server
        self._client = client
        self._log = log
        self._pool = pool
        self.duration_s = duration_s

    async def phase(self, clients: Callable[..., Tally], *arguments: float) -> Phase:
        """Runs `clients` in their process, and watches the server after the warm-up."""
        loop, address = asyncio.get_running_loop(), self._server.addresses["grpc"]
        self._log.ends.clear()
        async with StepRecorder(self._client) as recorder:
            running = loop.run_in_executor(self._pool, clients, address, self.duration_s, *arguments)
            await asyncio.sleep(WARM_UP_S)
            before = _processor_s(self._server.pid)
            await asyncio.sleep(self.duration_s)
            after = _processor_s(self._server.pid)
            tally = await running
        cores = {name: (after[name] - before[name]) / self.duration_s for name in after}
        steps = [step for step in recorder.steps if tally.from_s <= step.planned_ns * 1e-9 < tally.end_s]
        ended: Counter[str] = Counter()
        num_tokens: Counter[str] = Counter()
        for ended_s, reason, number in self._log.ends:
            if tally.from_s <= ended_s < tally.end_s:
                name = reason if reason == _IN_TIME else f"{reason}, {'running' if number else 'waiting'}"
                ended[name] += 1
                num_tokens[name] += number
        return Phase(
            tally,
            dict(ended),
            dict(num_tokens),
            len(steps) / self.duration_s,
            statistics.mean(step.num_decodes for step in steps) if steps else 0.0,
            statistics.mean(step.busy_ns * 1e-6 for step in steps) if steps else 0.0,
            idle_ratio(steps) or 0.0,
            cores | {"clients": tally.processor_s / self.duration_s},
        )


def _processor_s(pid: int) -> dict[str, float]:
    """Returns the processor time of the services of `quire serve`, by name."""
    import psutil

    services: dict[str, float] = {}
    for child in psutil.Process(pid).children(recursive=True):
        words = child.cmdline()
        for name in _SERVICES:
            if name in words:
                times = child.cpu_times()
                services[name] = times.user + times.system
    return services


def _table(median: Round) -> Table:
    """Returns where the output of a round went, with and without overload."""
    table = Table(box=None, pad_edge=False)
    table.add_column("the median round")
    columns = [_figures(median.without), _figures(median.under)]
    table.add_column("without overload", justify="right")
    table.add_column("under overload", justify="right")
    for name in {name: None for column in columns for name in column}:
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table


def _figures(phase: Phase) -> dict[str, str]:
    tally = phase.tally
    figures = {
        "clients: output in time, tokens/s": f"{tally.tokens_per_s:.0f}",
        "clients: other output, tokens/s": f"{tally.num_lost / tally.duration_s:.0f}",
        "server: output in time, tokens/s": f"{phase.served_per_s:.0f}",
    }
    for name, number in sorted(phase.num_tokens.items()):
        if name != _IN_TIME:
            figures[f"server: lost, {name}, tokens/s"] = f"{number / tally.duration_s:.0f}"
    figures |= {f"server: ended, {name}": str(number) for name, number in sorted(phase.ended.items())}
    figures |= {f"clients: {name}": str(number) for name, number in sorted(tally.outcomes.items())}
    figures |= {
        "steps/s": f"{phase.steps_per_s:.1f}",
        "decodes of a step": f"{phase.decodes_per_step:.1f}",
        "time of a step": f"{phase.step_ms:.2f} ms",
        "executor idle": f"{phase.executor_idle_ratio:.1%}",
    }
    return figures | {f"cores: {name}": f"{value:.2f}" for name, value in phase.cores.items()}


def main(arguments: Sequence[str]) -> None:
    parser = Parser("overload", __doc__)
    parser.add_argument("--times", type=float, default=3.0, help="offered load, as a multiple of the capacity")
    parser.add_argument("--clients", type=at_least(1), default=128, help="clients that measure the capacity")
    parser.add_argument("--deadline-s", type=float, default=4.0, help="seconds from the sending of a request")
    parser.add_argument("--duration-s", type=float, default=5.0, help="seconds of each of a round's two measurements")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    if not 0 < given.duration_s <= _MAX_DURATION_S or given.times <= 0 or given.deadline_s <= 0:
        raise BenchError(f"--times and --deadline-s must be positive, and --duration-s at most {_MAX_DURATION_S:.0f}")
    rounds = asyncio.run(
        measure(
            flags,
            times=given.times,
            num_clients=given.clients,
            duration_s=given.duration_s,
            deadline_s=given.deadline_s,
            num_rounds=given.rounds,
        )
    )
    console = open_console()
    median = sorted(rounds, key=lambda each: each.served_ratio)[len(rounds) // 2]
    console.print(_table(median))
    ratios = {
        "the clients": [each.goodput_ratio for each in rounds],
        "the server": [each.served_ratio for each in rounds],
    }
    for whose, values in ratios.items():
        each = ", ".join(f"{value:.1%}" for value in values)
        console.print(f"goodput as {whose} saw it: {statistics.median(values):.1%} of the capacity (rounds: {each})")
    if given.json is not None:
        report = {"ratios": ratios, "rounds": [asdict(each) for each in rounds]}
        save(given.json, {"machine": describe_machine(None), "flags": flags, **report})
