"""What it costs to watch: metrics with exemplars, a line of log a request, scrapes, and the live page left open.

    python -m bench.observability_cost                      # the worst case: an executor that takes no time
    python -m bench.observability_cost --executor embedded  # the embedded model: what users get

Two pairs of services run side by side: one as users run it (log as JSON at level info, read away; scraped every five
seconds as OpenMetrics, as in deploy/prometheus; the live page's events read by somebody), the other blind (that is
`bench.unobserved`: nothing is recorded, logged or shown). They are measured in turn, on, off, off, on, and so on, under
the load of `bench.shell_cost`; the one whose turn it is not has nothing to do. Each pair of turns gives a ratio; what
is printed is their median, and the spread that says how much of it to believe. Whatever else a machine does only slows
a turn down: where it does much, the best turn of each side says more.

With --executor null the scheduler is the bottleneck, and the ratio of tokens per second of its CPU time is the cost of
watching for a machine that has no time to spare; with an executor that computes, most of that is hidden behind steps.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from bench.shell_cost import MODEL, Cost, Load, Rig, Services, ShellCostError, rig

SCRAPE_INTERVAL_S = 5.0
OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@dataclass(frozen=True, slots=True)
class Turns:
    """The same load, once on each side."""

    watched: Cost
    blind: Cost

    @property
    def lost_ratio(self) -> float:
        """Share of the throughput."""
        return 1 - self.watched.tokens_per_s / self.blind.tokens_per_s

    @property
    def lost_cpu_ratio(self) -> float:
        """Share of what a second of the scheduler's CPU time streams."""
        return 1 - self.watched.tokens_per_cpu_s / self.blind.tokens_per_cpu_s


async def measure(
    num_pairs: int, load: Load, *, step_ms: float = 0.0, is_embedded: bool = False, is_page_open: bool = True
) -> list[Turns]:
    """After a turn each that does not count. Raises ShellCostError."""
    watched_services = _services("quire", "info", is_embedded)
    blind_services = _services("bench.unobserved", "error", is_embedded)
    async with rig(step_ms, services=watched_services) as watched, rig(step_ms, services=blind_services) as blind:
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
        module, "executor", "--model", str(MODEL), "--log-level", log_level, "--num-blocks", "4096",
        "--listen-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0",
    )  # fmt: skip
    return Services(
        scheduler=(module, "scheduler", "--log-level", log_level, "--log-format", "json"),
        executor=executor if is_embedded else None,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )


async def _watched(bench: Rig, load: Load, is_page_open: bool) -> Cost:
    async with aiohttp.ClientSession(f"http://{bench.http_address}", timeout=aiohttp.ClientTimeout()) as http:
        async with _meanwhile(_scrape(http)):
            if not is_page_open:
                return await bench.measure(load)
            async with _meanwhile(_look(http)):
                return await bench.measure(load)


async def _scrape(http: aiohttp.ClientSession) -> None:
    while True:
        async with http.get("/metrics", headers=OPEN_METRICS) as response:
            if not (await response.text()).endswith("# EOF\n"):
                raise ShellCostError("what was scraped is no OpenMetrics")
        await asyncio.sleep(SCRAPE_INTERVAL_S)


async def _look(http: aiohttp.ClientSession) -> None:
    """Reads what the live page is sent."""
    async with http.get("/live/events") as response:
        if response.status != 200:
            raise ShellCostError(f"the live page's events: status {response.status}")
        async for _ in response.content.iter_any():
            pass


@asynccontextmanager
async def _meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Until the block is left. Raises what the work raised."""
    task = asyncio.ensure_future(work)
    try:
        yield
        if task.done():
            task.result()
            raise ShellCostError("whoever watches has stopped")
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
            f"watching costs {statistics.median(lost):.1%} {name}: median of {len(lost)}, "
            f"from {min(lost):.1%} to {max(lost):.1%}; best turn against best turn {best_lost:.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.observability_cost")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=200, help="output of each request")
    parser.add_argument("--num-requests", type=int, default=4, help="of each client, in each turn")
    parser.add_argument("--executor", choices=("null", "embedded"), default="null")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a null executor takes for a step")
    parser.add_argument("--no-page", action="store_true", help="nobody has the live page open")
    parser.add_argument("--json", type=Path, help="where the figures go as well")
    arguments = parser.parse_args()
    load = Load(arguments.clients, arguments.num_tokens, arguments.num_requests)
    is_embedded = arguments.executor == "embedded"
    try:
        pairs = asyncio.run(
            measure(
                arguments.pairs,
                load,
                step_ms=arguments.step_ms,
                is_embedded=is_embedded,
                is_page_open=not arguments.no_page,
            )
        )
    except ShellCostError as error:
        sys.exit(f"observability_cost: {error}")
    print(table(pairs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
