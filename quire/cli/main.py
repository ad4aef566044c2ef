"""The command line: parses arguments, and calls the module that does the work."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from executor.config import ExecutorConfig
from executor.parallel.rank_config import RankConfig
from gateway.config import GatewayConfig
from planning.settings import DeploymentSettings, SimulateSettings
from quire.checksums import write_manifest
from quire.cli import exit_codes
from quire.cli.bench import app as bench_app
from quire.cli.config_flags import flag_parameters, given, with_flags
from quire.cli.connection_flags import connection_parameters, take_client
from quire.cli.fleet import app as fleet_app
from quire.cli.keys import app as keys_app
from quire.cli.option_flags import given_options, option_parameters
from quire.cli.outcome import fail, flushed, reported
from quire.cli.replicas import replicated_services
from quire.cli.serve_output import lines_to
from quire.cli.service_flags import (
    DEMO_FLAGS,
    EXECUTOR_FLAGS,
    GATEWAY_FLAGS,
    RANK_FLAGS,
    SCHEDULER_FLAGS,
    SERVE_FLAGS,
    with_model,
    with_schedulers,
)
from quire.cli.services import (
    run_executor,
    run_gateway,
    run_ranks,
    run_scheduler,
    service_pair,
)
from quire.cli.supervisor import ChildFailed
from quire.events import ChatMessage, Prompt
from quire.tries import DEFAULT_RESUME_TIMEOUT_S
from quire.version import build_version
from scheduler.config import SchedulerConfig

app = typer.Typer(
    name="quire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")
app.add_typer(keys_app, name="keys")
app.add_typer(fleet_app, name="fleet")


def _print_version(*, is_wanted: bool) -> None:
    if is_wanted:
        print(f"quire {build_version()}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=lambda value: _print_version(is_wanted=value),
            is_eager=True,
        ),
    ] = False,
) -> None:
    """LLM serving with a paged KV cache and continuous batching."""


def main() -> None:
    """Runs the console script `quire`."""
    # Python has no stream for a descriptor that was closed before its start; commands write to all of them.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model's text may contain characters that the terminal's encoding lacks
            stream.reconfigure(errors="replace")
    for name in ("COLUMNS", "LINES"):  # 0 means that the size is not known, and rich would print nothing
        if not os.environ.get(name, "").strip("0"):
            os.environ.pop(name, None)
    with flushed():
        app()


def serve(**values: Any) -> None:
    """Starts all services, keeps them running, and prints `ready …` when a completion can be generated.

    Without --model it serves the embedded checkpoint. SIGTERM, SIGHUP or Ctrl-C drains: running requests finish first.
    """
    from quire.cli.serve import serve as run

    with reported("supervisor", values.get("log_format")):
        num_replicas = values.pop("replicas", None) or 1
        chosen = with_model(values)
        services = service_pair(chosen) if num_replicas == 1 else replicated_services(chosen, num_replicas)
        with lines_to(sys.stdout, sys.stderr, services.replicas[0].scheduler.log_format) as (say, log):
            try:
                code = asyncio.run(run(services, say, log))
            except ChildFailed as failure:
                log("supervisor", str(failure))
                code = failure.exit_code
    raise typer.Exit(code)


def scheduler(**values: Any) -> None:
    """Runs the scheduler alone."""
    with reported("scheduler", values.get("log_format")):
        raise typer.Exit(run_scheduler(SchedulerConfig.from_dict(with_model(values))))


def executor(**values: Any) -> None:
    """Runs an executor alone."""
    with reported("executor", values.get("log_format")):
        raise typer.Exit(run_executor(ExecutorConfig.from_dict(with_model(values))))


def rank(**values: Any) -> None:
    """Runs ranks for an executor on another machine.

    That executor needs --remote-ranks, --ranks-listen and --ranks-key. The ranks join its group again and again, until
    SIGTERM.
    """
    with reported("rank", values.get("log_format")):
        raise typer.Exit(run_ranks(RankConfig(**{"join": "", "ranks_key": ""} | with_model(values))))


def gateway(**values: Any) -> None:
    """Runs the gateway alone: OpenAI's API, in front of the schedulers at each --scheduler.

    It calls them with the key in QUIRE_API_KEY, if there is one, and passes on the keys of its clients.
    """
    with reported("gateway", values.get("log_format")):
        raise typer.Exit(run_gateway(GatewayConfig.from_dict(with_schedulers(values))))


app.command()(with_flags(serve, SERVE_FLAGS))
app.command()(with_flags(scheduler, SCHEDULER_FLAGS))
app.command()(with_flags(executor, EXECUTOR_FLAGS))
app.command()(with_flags(rank, RANK_FLAGS))
app.command()(with_flags(gateway, GATEWAY_FLAGS))


def generate(
    prompt: Annotated[str | None, typer.Argument(help="text; absent or -: read from standard input")] = None,
    chat: Annotated[bool, typer.Option(help="the prompt is a user's message in a chat")] = False,
    system: Annotated[str | None, typer.Option(help="system message before it; implies --chat")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="deadline in seconds")] = None,
    resume_timeout_s: Annotated[
        float, typer.Option(min=0, help="seconds to try to continue a stream that broke off; 0: do not try")
    ] = DEFAULT_RESUME_TIMEOUT_S,
    stats: Annotated[bool, typer.Option("--stats", help="tokens and reasons on standard error")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="every event as a line of JSON")] = False,
    **values: Any,
) -> None:
    """Streams a completion to the terminal. Sends the API key in QUIRE_API_KEY, if there is one."""
    from quire.cli.generate import breaks_noted, write_json, write_text

    text = _stdin_text() if prompt in (None, "-") else prompt
    times = {"timeout_s": timeout_s, "resume_timeout_s": resume_timeout_s}
    with reported(), breaks_noted(sys.stderr), take_client(values, **times) as client:
        options = given_options(values)
        with client.generate(_prompt(text or "", chat, system), **options) as events:
            if as_json:
                write_json(events, sys.stdout)
            else:
                notes = sys.stderr if stats else None
                write_text(events, sys.stdout, notes, are_beams=bool(options.get("beam_width")))


app.command()(with_flags(generate, [*connection_parameters(admin=False), *option_parameters()]))


def kv(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="redraw until Ctrl-C")] = False,
    interval_s: Annotated[float, typer.Option(min=0.02, max=86_400, help="minimum time between two drawings")] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="once, as JSON")] = False,
    **values: Any,
) -> None:
    """Shows the block pool: the blocks of each request, shared blocks, and cached blocks."""
    from quire.cli import kv as view

    with reported(), take_client(values, timeout_s=10) as client:
        if as_json:
            view.show_json(client, Console())
        elif watch:
            view.watch(client, Console(), interval_s)
        else:
            view.show(client, Console())


def drain(
    undo: Annotated[bool, typer.Option("--undo", help="accept requests again")] = False,
    move_streams: Annotated[
        bool, typer.Option("--move-streams", help="have gateways continue their streams at other schedulers now")
    ] = False,
    timeout_s: Annotated[float | None, typer.Option(help="maximum time to wait, in seconds")] = None,
    **values: Any,
) -> None:
    """Makes a scheduler refuse new requests, and waits until all running ones have ended."""
    with reported(), take_client(values, timeout_s=timeout_s) as client:
        if undo:
            client.resume()
        else:
            client.drain(move_streams=move_streams)


@app.command()
def checksum(
    directory: Annotated[Path, typer.Argument(help="directory of a model", exists=True, file_okay=False)],
) -> None:
    """Writes SHA256SUMS, the digests of a model's files: from then on, no service loads a file that differs."""
    with reported():
        for name in write_manifest(directory):
            print(name)


app.command()(with_flags(kv, connection_parameters(admin=True)))
app.command()(with_flags(drain, connection_parameters(admin=True)))


def demo(**values: Any) -> None:
    """Starts both services on free ports, streams completions side by side, shows the block pool, and ends."""
    from quire.cli.demo import run

    with reported():
        raise typer.Exit(asyncio.run(run(with_model(values), Console())))


app.command()(with_flags(demo, DEMO_FLAGS))


def plan(
    model: Annotated[str, typer.Argument(help="a model directory, a config.json, or a name such as llama-3.1-8b")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    **values: Any,
) -> None:
    """Sizes a deployment from a model's config.json: weights, KV, blocks, sequences that fit, floors of a step."""
    from planning.command import run_plan

    with reported():
        run_plan(model, DeploymentSettings(**given(values)), Console(), as_json=as_json)


def simulate(
    model: Annotated[str, typer.Argument(help="a model directory, a config.json, or a name such as llama-3.1-8b")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, with samples over time")] = False,
    **values: Any,
) -> None:
    """Runs the scheduler on a virtual clock, with a device described by its data sheet or by measured steps."""
    from planning.command import run_simulate

    with reported():
        run_simulate(model, SimulateSettings(**given(values)), Console(), as_json=as_json)


app.command()(with_flags(plan, flag_parameters(DeploymentSettings)))
app.command()(with_flags(simulate, flag_parameters(SimulateSettings)))


def _stdin_text() -> str:
    """Returns standard input, without the newline at its end. Ends the command if it is closed or not text."""
    if sys.stdin is None:
        fail("the prompt is missing, and standard input is closed", exit_codes.USAGE)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        fail(f"the prompt is not text: {error}", exit_codes.USAGE)


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat and system is None:
        return text
    before = [ChatMessage("system", system)] if system is not None else []
    return [*before, ChatMessage("user", text)]


if __name__ == "__main__":
    main()
