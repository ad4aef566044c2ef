"""Closed-loop load with a seeded trace of mixed lengths: prints a table and saves JSON.

    python -m bench serve --spawn --concurrency 1,4,16,64 --baseline transformers
    python -m bench paired --model DIR --peer-url http://127.0.0.1:8000 --peer-model NAME --peer-command 'COMMAND'

All engines are up at once and take turns of seconds on each trace. Ratios are medians of the rounds (--rounds). While
Quire has its turn, the processes of a peer that was started here are stopped. On a GPU, Quire and the baseline share
the memory.
"""

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bench.command_line import SERVICE_FLAGS, Parser, at_least, open_console, parse_concurrencies
from bench.load import LoadError
from bench.machine import local_device
from bench.profiles import PROFILES
from bench.report import save
from bench.server_process import quire_server, until_idle
from bench.serving.engines import Engine, grpc_engine, in_process_engine, openai_engine, quire_engine
from bench.serving.measurer import LoadSettings, Run, measure, plan_turns, warm_up_trace
from bench.serving.openai_server import openai_process
from bench.serving.report import describe_run, render_table, report
from bench.step_traces import save_chrome_trace
from bench.trace import LENGTHS
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo
from quire.channel import DEFAULT_ADDRESS
from quire.model_path import resolved_model

if TYPE_CHECKING:
    import argparse

    from bench.kernels.ceilings import Ceilings

_CEILING_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True)
class Peer:
    """An OpenAI-compatible server to compare with.

    url      its root
    model    its name for the model
    command  starts it; it is ended after the measurement. Empty: it runs already
    """

    url: str
    model: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """A serving measurement.

    load            the load that all engines get
    address         gRPC address of a running Quire server
    spawn           flags of `quire serve`, to start a server for the measurement; None: the one at `address` runs
    peer            an OpenAI-compatible server to compare with
    peer_grpc       gRPC address of a Quire server to compare with; neither server's pool and steps are read then
    baseline_model  model for static batches of transformers in this process; None: no baseline
    chrome_trace    file for Quire's steps, one for each number of clients (NAME-cN.json); None: they are not saved
    """

    load: LoadSettings
    address: str = DEFAULT_ADDRESS
    spawn: tuple[str, ...] | None = None
    peer: Peer | None = None
    peer_grpc: str | None = None
    baseline_model: str | None = None
    chrome_trace: Path | None = None


async def run(settings: ServeSettings, console: Console) -> tuple[ServerInfo, list[Run]]:
    """Starts the servers that the settings name, measures, and ends them. Raises BenchError and QuireError."""
    async with AsyncExitStack() as resources:
        address = settings.address
        started: list[int] = []
        if settings.spawn is not None:
            with console.status("starting the services"):
                server = await resources.enter_async_context(quire_server(settings.spawn))
            address = server.addresses["grpc"]
            started.append(server.pid)
        client = await resources.enter_async_context(AsyncClient(address, resume_timeout_s=0))
        info = await client.server_info()
        own = quire_engine(client) if settings.peer_grpc is None else grpc_engine("quire", client)
        engines = [own, *await _other_engines(settings, info, resources, console)]
        started += [engine.process_group for engine in engines if engine.process_group is not None]
        with console.status("waiting until the servers are idle"):
            if started and not await until_idle(started):
                console.print("a server is busy without a load, and takes time from the other")
        turns = plan_turns(settings.load, info)

        def on_run(done: Run) -> None:
            console.print(describe_run(done))
            _save_steps(settings, done)

        with console.status("measuring"):
            return info, await measure(engines, turns, warm_up_trace(turns[0].trace), on_run)


async def _other_engines(
    settings: ServeSettings, info: ServerInfo, resources: AsyncExitStack, console: Console
) -> list[Engine]:
    engines = []
    if (peer := settings.peer) is not None:
        process_group = None
        if peer.command:
            with console.status("starting the peer"):
                process_group = await resources.enter_async_context(openai_process(peer.command, peer.url))
        engines.append(openai_engine(peer.url, peer.model, process_group))
    if settings.peer_grpc is not None:
        client = await resources.enter_async_context(AsyncClient(settings.peer_grpc, resume_timeout_s=0))
        engines.append(grpc_engine("peer", client))
    if settings.baseline_model is not None:
        from bench.serving.static_batches import StaticBatches

        with console.status("loading the baseline"):
            batches = StaticBatches(settings.baseline_model, info.dtype)
        if batches.vocab_size != info.vocab_size:
            raise LoadError(f"{settings.baseline_model} is not the model that the server serves")
        engines.append(in_process_engine("transformers", batches))
    return engines


def _save_steps(settings: ServeSettings, run: Run) -> None:
    if (path := settings.chrome_trace) is None or not run.observed.steps:
        return
    name = run.turn.profile or f"c{run.turn.concurrency}"
    round_suffix = f"-r{run.turn.round_index}" if run.turn.round_index else ""
    save_chrome_trace(path.with_stem(f"{path.stem}-{name}{round_suffix}"), run.observed.steps)


def how_started(settings: ServeSettings) -> dict[str, Any]:
    """Returns, as JSON values, what a reader needs to start the same servers."""
    return {
        "spawn": settings.spawn,
        "peer": asdict(settings.peer) if settings.peer is not None else settings.peer_grpc,
        "baseline_model": settings.baseline_model,
    }


def _measure_ceilings() -> "Ceilings":
    """Measures the device that the services used, after they have ended."""
    import torch

    from bench.kernels.ceilings import measure_ceilings

    return measure_ceilings(local_device() or torch.device("cpu"), (torch.float32,), _CEILING_BUDGET_S)


def parser() -> Parser:
    """Returns the parser of the flags of `serve` and `paired`."""
    flags = Parser("serve", f"{__doc__}\n{SERVICE_FLAGS}")
    flags.add_argument("--url", help=f"gRPC address of a server (default: {DEFAULT_ADDRESS})")
    flags.add_argument("--spawn", action="store_true", help="start a server, with the flags of `quire serve`")
    flags.add_argument("--concurrency", "-c", default="1,4,16,64", help="numbers of clients (default: %(default)s)")
    flags.add_argument("--rounds", type=at_least(1), default=1, help="rounds of turns (default: %(default)s)")
    flags.add_argument("--num-requests", type=at_least(1), help="requests of each run (default: 4 for each client)")
    flags.add_argument("--seed", type=int, default=7, help="seed of the traces (default: %(default)s)")
    flags.add_argument("--num-shared-tokens", type=at_least(0), default=0, help="tokens that all prompts begin with")
    flags.add_argument("--lengths", choices=sorted(LENGTHS), default="mixed", help="lengths of prompts and outputs")
    flags.add_argument(
        "--profile", help=f"other loads, with commas between them, in place of --concurrency: {', '.join(PROFILES)}"
    )
    flags.add_argument("--peer-url", help="root of an OpenAI-compatible server to compare with")
    flags.add_argument("--peer-model", help="the peer's name for the model")
    flags.add_argument("--peer-grpc", help="gRPC address of another Quire server to compare with")
    flags.add_argument("--peer-command", help="command that starts the peer; it is ended after the measurement")
    flags.add_argument(
        "--baseline", nargs="?", const="transformers", choices=["transformers"],
        help="compare with static batches of generate(), in this process, on --model",
    )  # fmt: skip
    flags.add_argument("--model", help="directory or hub id of the model (default: the embedded one)")
    flags.add_argument("--name", default="serve", help="name of the file of results (default: %(default)s)")
    flags.add_argument("--chrome-trace", type=Path, help="save the steps of each run for chrome://tracing")
    flags.add_argument("--output", "--json", type=Path, help="file of results (default: bench/results/NAME.json)")
    return flags


def parse(arguments: Sequence[str]) -> tuple["argparse.Namespace", ServeSettings]:
    """Raises BenchError, ModelNotFound, and SystemExit for wrong flags."""
    flags = parser()
    given, others = flags.parse_known_args(arguments)
    if bool(given.peer_url) != bool(given.peer_model):
        flags.error("--peer-url and --peer-model go together")
    if given.peer_grpc and given.peer_url:
        flags.error("--peer-grpc and --peer-url name two peers; there can be one")
    if given.peer_command and not given.peer_url:
        flags.error("--peer-command needs --peer-url")
    if given.url and given.spawn:
        flags.error("--url names a server that runs, --spawn starts one")
    if others and not given.spawn:
        flags.error(f"unknown flags without --spawn: {' '.join(others)}")
    model = resolved_model(given.model) if given.spawn or given.baseline else None
    peer = None
    if given.peer_url:
        peer = Peer(given.peer_url, given.peer_model, tuple(shlex.split(given.peer_command or "")))
    profiles = tuple(filter(None, (given.profile or "").split(",")))
    if unknown := set(profiles) - set(PROFILES):
        flags.error(f"--profile: no profile is called {', '.join(sorted(unknown))}; there are {', '.join(PROFILES)}")
    load = LoadSettings(
        parse_concurrencies(given.concurrency), given.num_requests, given.seed, given.num_shared_tokens,
        given.lengths, given.rounds, profiles,
    )  # fmt: skip
    return given, ServeSettings(
        load,
        address=given.url or DEFAULT_ADDRESS,
        spawn=("--model", str(model), *others) if given.spawn else None,
        peer=peer,
        peer_grpc=given.peer_grpc,
        baseline_model=model if given.baseline else None,
        chrome_trace=given.chrome_trace,
    )


def main(arguments: Sequence[str]) -> None:
    given, settings = parse(arguments)
    console = open_console()
    info, runs = asyncio.run(run(settings, console))
    console.print(render_table(runs))
    values: dict[str, Any] = report(runs, info) | how_started(settings)
    if settings.spawn is not None:
        with console.status("measuring the machine's best rates"):
            values["ceilings"] = asdict(_measure_ceilings())
    output = given.output or Path("bench") / "results" / f"{given.name}.json"
    save(output, values)
    console.print(f"saved to {output}")
