"""The command line: parses, calls the module that does the work, and turns errors into messages and exit codes."""

import asyncio
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from planning.settings import DeploymentSettings, SimulateSettings
from quire.channel import DEFAULT_ADDRESS
from quire.cli import exit_codes
from quire.cli.bench import app as bench_app
from quire.cli.config_flags import flag_parameters, given, with_flags
from quire.cli.outcome import fail, reported
from quire.cli.serve_output import lines_to
from quire.cli.service_flags import EXECUTOR_FLAGS, SCHEDULER_FLAGS, SERVICE_FLAGS, with_model
from quire.cli.services import (
    executor_config,
    run_executor,
    run_scheduler,
    scheduler_config,
    service_pair,
)
from quire.cli.supervisor import ChildFailed
from quire.client import Client
from quire.events import ChatMessage, Prompt

app = typer.Typer(
    name="quire",
    help="LLM serving with a paged KV cache and continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")

_Address = Annotated[str, typer.Option("--address", help="of the scheduler: host:port, or unix:path")]


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model's text may hold what the terminal's encoding does not
            stream.reconfigure(errors="replace")
    app()


def serve(**values: Any) -> None:
    """Starts scheduler and executor, keeps them running, and prints `ready …` when a completion can be generated.

    Without --model it serves the embedded checkpoint. SIGTERM or Ctrl-C drains: what runs finishes first.
    """
    from quire.cli.serve import serve as run

    with reported():
        pair = service_pair(with_model(values))
        with lines_to(sys.stdout, sys.stderr, pair.scheduler.log_format) as (say, log):
            try:
                code = asyncio.run(run(pair, say, log))
            except ChildFailed as failure:
                log("supervisor", str(failure))  # and whoever does not read that gets the exit code all the same
                code = failure.exit_code
    raise typer.Exit(code)


def scheduler(**values: Any) -> None:
    """Runs the scheduler alone."""
    with reported():
        raise typer.Exit(run_scheduler(scheduler_config(with_model(values))))


def executor(**values: Any) -> None:
    """Runs an executor alone."""
    with reported():
        raise typer.Exit(run_executor(executor_config(with_model(values))))


app.command()(with_flags(serve, SERVICE_FLAGS))
app.command()(with_flags(scheduler, SCHEDULER_FLAGS))
app.command()(with_flags(executor, EXECUTOR_FLAGS))


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="text; absent or -: read from standard input")] = None,
    address: _Address = DEFAULT_ADDRESS,
    chat: Annotated[bool, typer.Option(help="the prompt is a user's message in a chat")] = False,
    system: Annotated[str | None, typer.Option(help="system message before it; implies --chat")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens to generate")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="fewest tokens to generate")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="in (0, 1]")] = None,
    top_k: Annotated[int | None, typer.Option(help="0: all")] = None,
    min_p: Annotated[float | None, typer.Option(help="in [0, 1]")] = None,
    seed: Annotated[int | None, typer.Option(help="same seed, same tokens")] = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", help="sequences sampled from the prompt, or beams shown")
    ] = None,
    beam_width: Annotated[int | None, typer.Option(help="search for the most probable text with so many beams")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="of beams: above 0 favours long ones")] = None,
    early_stopping: Annotated[bool, typer.Option("--early-stopping", help="of beams: end with the last one")] = False,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: none")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="for each time a token was generated")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="for each token that was generated")] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=VALUE", help="added to a token's logit; may be repeated")
    ] = None,
    allowed_token_id: Annotated[list[int] | None, typer.Option(help="no other token; may be repeated")] = None,
    logprobs: Annotated[int | None, typer.Option(help="show log-probabilities, and of so many others")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="the same of the prompt's tokens")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="ends the text; may be repeated")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="ends the sequence; may be repeated")] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="keep what ended the text")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after EOS")] = False,
    priority: Annotated[int | None, typer.Option(help="lower runs earlier, under that policy")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="share prefixes only with requests of this salt")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="deadline in seconds")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="tokens and reasons on standard error")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="every event as a line of JSON")] = False,
) -> None:
    """Streams a completion to the terminal."""
    from quire.cli.generate import write_json, write_text

    text = _stdin_text() if prompt in (None, "-") else prompt
    with reported(), Client(address) as client:
        events = client.generate(
            _prompt(text or "", chat, system),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            n=n,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping or None,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=_biases(logit_bias or []),
            allowed_token_ids=allowed_token_id,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=stop,
            stop_token_ids=stop_token_id,
            include_stop=include_stop or None,
            ignore_eos=ignore_eos or None,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        with events:
            if as_json:
                write_json(events, sys.stdout)
            else:
                write_text(events, sys.stdout, sys.stderr if stats else None, are_beams=bool(beam_width))


@app.command()
def kv(
    address: _Address = DEFAULT_ADDRESS,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="redraw until Ctrl-C")] = False,
    interval_s: Annotated[float, typer.Option(min=0.02, help="between two drawings, at least")] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="once, as JSON")] = False,
) -> None:
    """Shows the block pool: who owns which block, what is shared, what is cached."""
    from quire.cli import kv as view

    with reported(), Client(address, timeout_s=10) as client:
        if as_json:
            view.show_json(client, Console())
        elif watch:
            view.watch(client, Console(), interval_s)
        else:
            view.show(client, Console())


def demo(**values: Any) -> None:
    """Starts both services on free ports, streams completions side by side, shows the block pool, and ends."""
    from quire.cli.demo import run

    with reported():
        raise typer.Exit(asyncio.run(run(with_model(values), Console())))


app.command()(with_flags(demo, SERVICE_FLAGS))


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
    """Runs the scheduler on a virtual clock, with a device of which the data sheet or measured steps are known."""
    from planning.command import run_simulate

    with reported():
        run_simulate(model, SimulateSettings(**given(values)), Console(), as_json=as_json)


app.command()(with_flags(plan, flag_parameters(DeploymentSettings)))
app.command()(with_flags(simulate, flag_parameters(SimulateSettings)))


def _stdin_text() -> str:
    """All of standard input, without the newline that ends its last line."""
    return sys.stdin.read().removesuffix("\n")


def _biases(entries: list[str]) -> dict[int, float]:
    """`["17=-5", "4=2.5"]` → {17: -5.0, 4: 2.5}."""
    biases = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            fail(f"--logit-bias: expected ID=VALUE, not {entry!r}", exit_codes.USAGE)
    return biases


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat and system is None:
        return text
    before = [ChatMessage("system", system)] if system is not None else []
    return [*before, ChatMessage("user", text)]


if __name__ == "__main__":
    main()
