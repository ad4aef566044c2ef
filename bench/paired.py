"""Quire beside another server in turns of seconds, so that both meet the same machine.

    python -m bench.paired --model DIR --peer-url http://127.0.0.1:8000 --peer-model NAME --peer-command 'COMMAND'
    python -m bench.paired --model DIR --baseline

The second form takes static batches of `transformers.generate`, in this process, for the other server.

A machine that is shared with others changes its speed from minute to minute: a server that is measured minutes after
another one meets a different machine. Here both are up all the time: for each number of clients they take turns on one
trace, and change who begins from round to round. While Quire has its turn, the peer's processes are stopped. Each round
has a trace of its own, so that nobody finds the last one's prompts cached. The ratio of a number of clients is the
median of its rounds' ratios.
"""

import argparse
import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.command import BenchError, parse_concurrencies
from bench.load import LoadError
from bench.machine import describe_machine
from bench.openai_peer import peer_process, peer_sender, peer_session
from bench.report import RunSummary, save, summarize
from bench.serve import (
    BenchSettings,
    Engine,
    Observed,
    quire_engine,
    server_engine,
    static_engine,
    trace_settings,
    warmup_trace,
)
from bench.spawned import beside_services
from bench.static_baseline import StaticBatches
from bench.trace import TraceRequest, make_trace
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo
from quire.cli.services import on_free_ports, service_pair
from quire.cli.supervisor import ChildFailed
from quire.errors import QuireError
from quire.model_path import resolved_model


@dataclass(frozen=True, slots=True)
class Pair:
    """The same trace through both, one right after the other."""

    quire: RunSummary
    peer: RunSummary

    @property
    def ratio(self) -> float:
        """Quire's output tokens a second over the peer's."""
        return self.quire.output_tokens_per_s / self.peer.output_tokens_per_s


@contextmanager
def stopped(process_group: int | None) -> Iterator[None]:
    """None of its processes runs meanwhile. None: there are none, the peer runs here, when it is asked to."""
    if process_group is None:
        yield
        return
    os.killpg(process_group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process_group, signal.SIGCONT)


async def measure(
    settings: BenchSettings, num_rounds: int, info: ServerInfo, quire: Engine, peer: Engine, process_group: int | None
) -> list[Pair]:
    """All rounds, one pair for each number of clients and round. Raises LoadError."""
    engines = {"quire": quire, "peer": peer}
    for engine in engines.values():
        await engine(warmup_trace(settings, info), 1)
    pairs = []
    for index in range(num_rounds):
        drawn = replace(settings, seed=settings.seed + index)
        for concurrency in settings.concurrencies:
            trace = make_trace(trace_settings(drawn, info, concurrency))
            runs = {}
            for name in engines if index % 2 == 0 else reversed(engines):
                with stopped(process_group) if name == "quire" else nullcontext():
                    observed = await engines[name](trace, concurrency)
                runs[name] = summarize(name, observed.load, observed.pool, observed.steps)
            pairs.append(Pair(**runs))
    return pairs


def by_concurrency(pairs: Sequence[Pair]) -> dict[int, list[Pair]]:
    found: dict[int, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.quire.concurrency, []).append(pair)
    return found


def render(pairs: Sequence[Pair]) -> Table:
    """Medians over the rounds; latencies are medians of the rounds' medians, in ms."""
    table = Table(title="medians of the rounds", box=None, padding=(0, 2, 0, 0))
    for heading in ("c", "Quire tokens/s", "peer", "ratio", "from-to", "TTFT", "peer", "TPOT", "peer", "idle", "waste"):
        table.add_column(heading, justify="right")
    for concurrency, own in by_concurrency(pairs).items():
        ratios = [pair.ratio for pair in own]
        table.add_row(
            str(concurrency),
            f"{median(pair.quire.output_tokens_per_s for pair in own):,.0f}",
            f"{median(pair.peer.output_tokens_per_s for pair in own):,.0f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            _middle(pair.quire.ttft_ms.p50 for pair in own if pair.quire.ttft_ms),
            _middle(pair.peer.ttft_ms.p50 for pair in own if pair.peer.ttft_ms),
            _middle(pair.quire.tpot_ms.p50 for pair in own if pair.quire.tpot_ms),
            _middle(pair.peer.tpot_ms.p50 for pair in own if pair.peer.tpot_ms),
            _middle(
                (pair.quire.executor_idle_ratio for pair in own if pair.quire.executor_idle_ratio is not None), ".1%"
            ),
            _middle((pair.quire.pool.mean_waste_ratio for pair in own if pair.quire.pool), ".1%"),
        )
    return table


def _middle(values: Iterator[float], form: str = ".1f") -> str:
    known = list(values)
    return format(median(known), form) if known else "-"


def as_values(pairs: Sequence[Pair], info: ServerInfo) -> dict[str, Any]:
    """For JSON."""
    return {
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "server": asdict(info),
        "ratios": {str(c): median(pair.ratio for pair in own) for c, own in by_concurrency(pairs).items()},
        "pairs": [asdict(pair) | {"ratio": pair.ratio} for pair in pairs],
    }


def _peer_engine(url: str, model: str) -> Engine:
    """With connections of its own for each turn: old ones are timed out as soon as the server goes on."""

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        async with peer_session() as session:
            return await server_engine(peer_sender(session, url, model))(trace, concurrency)

    return run


@asynccontextmanager
async def _started_peer(given: argparse.Namespace, info: ServerInfo) -> AsyncIterator[tuple[Engine, int | None]]:
    """What Quire is measured beside, and its processes."""
    if given.baseline:
        yield static_engine(StaticBatches(resolved_model(given.model), info.dtype)), None
        return
    async with peer_process(shlex.split(given.peer_command), given.peer_url) as process_group:
        yield _peer_engine(given.peer_url, given.peer_model), process_group


async def run(given: argparse.Namespace, console: Console) -> tuple[list[Pair], ServerInfo]:
    """Starts both, measures, ends both. Raises LoadError, QuireError and ChildFailed."""
    services = service_pair(on_free_ports({"model": given.model, "dtype": given.dtype}))
    settings = BenchSettings(services.scheduler.listen, parse_concurrencies(given.concurrency), seed=given.seed)

    async def beside() -> tuple[list[Pair], ServerInfo]:
        async with AsyncClient(settings.address) as client:
            info = await client.server_info()
            async with _started_peer(given, info) as (peer, process_group):
                await asyncio.sleep(given.rest_s)
                return await measure(settings, given.rounds, info, quire_engine(client), peer, process_group), info

    return await beside_services(services, beside, console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or hub id that Quire serves")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-url", help="of an OpenAI-compatible server")
    parser.add_argument("--peer-model", help="the name it serves the model by")
    parser.add_argument("--peer-command", help="starts it")
    parser.add_argument("--baseline", action="store_true", help="static batches of generate() instead of a server")
    parser.add_argument("--concurrency", default="1,4,8,16,32,64", help="numbers of clients, with commas between them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rest-s", type=float, default=10.0, help="between `ready` and the first round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.baseline == all((given.peer_url, given.peer_model, given.peer_command)):
        parser.error("name a server by --peer-url, --peer-model and --peer-command, or ask for the --baseline")
    console = Console()
    try:
        pairs, info = asyncio.run(run(given, console))
    except (BenchError, LoadError, QuireError, ChildFailed) as error:
        raise SystemExit(f"bench.paired: {error}") from error
    console.print(render(pairs))
    if given.json is not None:
        save(given.json, as_values(pairs, info))


if __name__ == "__main__":
    main()
