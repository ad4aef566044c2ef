"""The cost of observability: metrics with exemplars, a log line for each request, scrapes, and an open live page.

    python -m bench observability-cost                      # the worst case: an executor that takes no time
    python -m bench observability-cost --executor embedded  # the embedded model: what users get

Two pairs of services run side by side. One runs as in production: it logs JSON at level info, is scraped every five
seconds as OpenMetrics, as in deploy/prometheus, and a client reads the live page's events. The other one records, logs
and shows nothing (`bench.overhead.unobserved`). They take turns (on, off, off, on, …) under the load of `bench
shell-cost`, and each is idle while the other has its turn. Each pair of turns gives a ratio. The output has the median
and the range of the ratios. Other work on the machine only slows turns down, so on a busy machine comparing
the best turns of both sides is more reliable.

With --executor null the scheduler is the bottleneck, and the ratio of tokens per second of its CPU time is the cost of
observability on a machine without spare time. With an executor that computes, most of that is hidden behind steps.
"""

import asyncio
import os
import statistics
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from bench.command_line import Parser
from bench.overhead.shell_cost import Cost, Harness, Services, harness
from bench.overhead.stream_load import Load, ShellCostError
from bench.report import save
from quire.model_path import embedded_model

SCRAPE_INTERVAL_S = 5.0
OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@dataclass(frozen=True, slots=True)
class Turns:
    """A pair of turns: the same load on each side."""

    watched: Cost
    blind: Cost

    @property
    def lost_ratio(self) -> float:
        """Share of the throughput that is lost."""
        return 1 - self.watched.tokens_per_s / self.blind.tokens_per_s

    @property
    def lost_cpu_ratio(self) -> float:
        """Share of the tokens per second of scheduler CPU time that is lost."""
        return 1 - self.watched.tokens_per_cpu_s / self.blind.tokens_per_cpu_s


async def measure(
    num_pairs: int, load: Load, *, step_ms: float = 0.0, is_embedded: bool = False, is_page_open: bool = True
) -> list[Turns]:
    """Measures pairs of turns, after a turn of each side that is not counted. Raises ShellCostError."""
    watched_services = _services("quire", "info", is_embedded)
    blind_services = _services("bench.overhead.unobserved", "error", is_embedded)
    async with (
        harness(step_ms, services=watched_services) as watched,
        harness(step_ms, services=blind_services) as blind,
    ):
        await blind.measure(load)
        await _watched(watched, load, is_page_open)
        pairs = []
        for number in range(num_pairs):
            if number % 2:
                off = await blind.measure(load)
                on = await _watched(watched, load, is_page_open)
            else:
                on = await _watched(watched, load, is_page_open)
                off = await blind.measure(load)
            pairs.append(Turns(on, off))
        return pairs


def _services(module: str, log_level: str, is_embedded: bool) -> Services:
    executor = (
        module, "executor", "--model", embedded_model(), "--log-level", log_level, "--num-blocks", "4096",
        "--listen-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0",
    )  # fmt: skip
    return Services(
        scheduler=(module, "scheduler", "--log-level", log_level, "--log-format", "json"),
        executor=executor if is_embedded else None,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )


async def _watched(running: Harness, load: Load, is_page_open: bool) -> Cost:
    async with aiohttp.ClientSession(f"http://{running.http_address}", timeout=aiohttp.ClientTimeout()) as http:
        async with _meanwhile(_scrape(http)):
            if not is_page_open:
                return await running.measure(load)
            async with _meanwhile(_look(http)):
                return await running.measure(load)


async def _scrape(http: aiohttp.ClientSession) -> None:
    while True:
        async with http.get("/metrics", headers=OPEN_METRICS) as response:
            if not (await response.text()).endswith("# EOF\n"):
                raise ShellCostError("the scraped text is not OpenMetrics")
        await asyncio.sleep(SCRAPE_INTERVAL_S)


async def _look(http: aiohttp.ClientSession) -> None:
    """Reads the events of the live page."""
    async with http.get("/live/events") as response:
        if response.status != 200:
            raise ShellCostError(f"the live page's events: status {response.status}")
        async for _ in response.content.iter_any():
            pass


@asynccontextmanager
async def _meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `work` until the end of the block. Raises the error of the work."""
    task = asyncio.ensure_future(work)
    try:
        yield
        if task.done():
            task.result()
            raise ShellCostError("the scrape or the live page has ended")
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ShellCostError):
            await task


def table(pairs: Sequence[Turns]) -> str:
    lines = [f"{'pair':>6} {'tokens/s on':>12} {'off':>9} {'lost':>7} {'tokens/CPU s on':>16} {'off':>9} {'lost':>7}"]
    for number, pair in enumerate(pairs, start=1):
        on, off = pair.watched, pair.blind
        lines.append(
            f"{number:>6} {on.tokens_per_s:>12.0f} {off.tokens_per_s:>9.0f} {pair.lost_ratio:>7.1%} "
            f"{on.tokens_per_cpu_s:>16.0f} {off.tokens_per_cpu_s:>9.0f} {pair.lost_cpu_ratio:>7.1%}"
        )
    best = Turns(
        watched=max((pair.watched for pair in pairs), key=lambda cost: cost.tokens_per_cpu_s),
        blind=max((pair.blind for pair in pairs), key=lambda cost: cost.tokens_per_cpu_s),
    )
    for name, lost, best_lost in (
        ("of throughput", [pair.lost_ratio for pair in pairs], best.lost_ratio),
        ("of the scheduler's CPU time", [pair.lost_cpu_ratio for pair in pairs], best.lost_cpu_ratio),
    ):
        lines.append(
            f"observability costs {statistics.median(lost):.1%} {name}: median of {len(lost)}, "
            f"from {min(lost):.1%} to {max(lost):.1%}; best turn against best turn {best_lost:.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = Parser("observability-cost", __doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of turns")
    parser.add_argument("--clients", type=int, default=64, help="number of clients")
    parser.add_argument("--num-tokens", type=int, default=200, help="tokens of output of each request")
    parser.add_argument("--num-requests", type=int, default=4, help="requests of each client in each turn")
    parser.add_argument("--executor", choices=("null", "embedded"), default="null")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that a null executor takes for a step")
    parser.add_argument("--no-page", action="store_true", help="leave the live page closed")
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    load = Load(given.clients, given.num_tokens, given.num_requests)
    pairs = asyncio.run(
        measure(
            given.pairs,
            load,
            step_ms=given.step_ms,
            is_embedded=given.executor == "embedded",
            is_page_open=not given.no_page,
        )
    )
    print(table(pairs))
    if given.json is not None:
        save(given.json, [asdict(pair) for pair in pairs])
