"""The command line: parses, calls the module that does the work, and turns errors into messages and exit codes."""

import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from executor.config import ExecutorConfig
from planning.errors import PlanningError
from planning.settings import DeploymentSettings, SimulateSettings
from quire import exit_codes
from quire.addresses import AddressInUse
from quire.channel import DEFAULT_ADDRESS
from quire.client import Client
from quire.config_flags import flag_parameters, given, with_flags
from quire.errors import InvalidRequestError, QuireError
from quire.events import ChatMessage, Prompt
from quire.model_path import ModelNotFound, resolved_model
from quire.services import (
    EXECUTOR_ADDRESS,
    ConfigError,
    executor_config,
    run_executor,
    run_scheduler,
    scheduler_config,
    service_pair,
)
from quire.supervisor import ChildFailed, LogSink
from scheduler.config import SchedulerConfig

app = typer.Typer(
    name="quire",
    help="LLM serving with a paged KV cache and continuous batching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

_SCHEDULER_FLAGS = flag_parameters(SchedulerConfig)
_EXECUTOR_FLAGS = flag_parameters(ExecutorConfig)
# Both at once: a field that both have is said once, and so is the address at which they meet.
_SERVICE_FLAGS = flag_parameters(ExecutorConfig, leave_out={EXECUTOR_ADDRESS[1]}) + flag_parameters(
    SchedulerConfig, leave_out={field.name for field in fields(ExecutorConfig)}
)
# What a measurement leaves open where it decides the rest itself.
_MODEL_FLAGS = flag_parameters(
    ExecutorConfig, leave_out={field.name for field in fields(ExecutorConfig)} - {"model", "dtype", "device"}
)


class LengthMix(StrEnum):
    """How long prompts and outputs are."""

    MIXED = "mixed"
    SHAREGPT = "sharegpt"


class Baseline(StrEnum):
    """What to compare with, in this process."""

    TRANSFORMERS = "transformers"


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
    from quire.serve import serve as run

    with _reported():
        pair = service_pair(_with_model(values))
        raise typer.Exit(asyncio.run(run(pair, _say, _log_to_stderr(pair.scheduler.log_format))))


def scheduler(**values: Any) -> None:
    """Runs the scheduler alone."""
    with _reported():
        raise typer.Exit(run_scheduler(scheduler_config(_with_model(values))))


def executor(**values: Any) -> None:
    """Runs an executor alone."""
    with _reported():
        raise typer.Exit(run_executor(executor_config(_with_model(values))))


app.command()(with_flags(serve, _SERVICE_FLAGS))
app.command()(with_flags(scheduler, _SCHEDULER_FLAGS))
app.command()(with_flags(executor, _EXECUTOR_FLAGS))


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
    from quire.generate import write_json, write_text

    text = _stdin_text() if prompt in (None, "-") else prompt
    with _reported(), Client(address) as client:
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
    interval_s: Annotated[float, typer.Option(min=0.02, help="between two drawings")] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="once, as JSON")] = False,
) -> None:
    """Shows the block pool: who owns which block, what is shared, what is cached."""
    from quire import kv as view

    with _reported(), Client(address, timeout_s=10) as client:
        if as_json:
            view.show_json(client, Console())
        elif watch:
            view.watch(client, Console(), interval_s)
        else:
            view.show(client, Console())


def demo(**values: Any) -> None:
    """Starts both services on free ports, streams completions side by side, shows the block pool, and ends."""
    from quire.demo import run

    with _reported():
        raise typer.Exit(asyncio.run(run(_with_model(values), Console())))


app.command()(with_flags(demo, _SERVICE_FLAGS))


def bench_serve(
    url: Annotated[str | None, typer.Option(help=f"gRPC address of a server [default: {DEFAULT_ADDRESS}]")] = None,
    spawn: Annotated[bool, typer.Option("--spawn", help="start one, with the services' flags below")] = False,
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="numbers of clients")] = "1,4,16,64",
    num_requests: Annotated[int | None, typer.Option(min=1, help="of each run; default 4 a client")] = None,
    seed: Annotated[int, typer.Option(help="of the trace")] = 7,
    num_shared_tokens: Annotated[int, typer.Option(min=0, help="tokens that all prompts begin with")] = 0,
    lengths: Annotated[LengthMix, typer.Option(help="of prompts and outputs")] = LengthMix.MIXED,
    peer_url: Annotated[str | None, typer.Option(help="an OpenAI-compatible server, for comparison")] = None,
    peer_model: Annotated[str | None, typer.Option(help="the name it serves the model by")] = None,
    peer_command: Annotated[str | None, typer.Option(help="starts it when its turn comes; ended after it")] = None,
    baseline: Annotated[Baseline | None, typer.Option(help="static batches of generate() on --model")] = None,
    name: Annotated[str, typer.Option(help="of the results' file")] = "serve",
    chrome_trace: Annotated[Path | None, typer.Option(help="save each run's steps for chrome://tracing")] = None,
    output: Annotated[Path | None, typer.Option(help="default: bench/results/NAME.json")] = None,
    **values: Any,
) -> None:
    """Closed-loop load with a seeded trace of mixed lengths; prints a table and saves JSON."""
    from bench.command import BenchError, parse_concurrencies, run
    from bench.serve import BenchSettings, Peer

    if bool(peer_url) != bool(peer_model):
        _fail("--peer-url and --peer-model go together", exit_codes.USAGE)
    if peer_command and not peer_url:
        _fail("--peer-command needs --peer-url", exit_codes.USAGE)
    with _reported():
        try:
            settings = BenchSettings(
                address=url or DEFAULT_ADDRESS,
                concurrencies=parse_concurrencies(concurrency),
                num_requests=num_requests,
                seed=seed,
                num_shared_tokens=num_shared_tokens,
                lengths=lengths.value,
                peer=Peer(peer_url, peer_model, tuple(shlex.split(peer_command or "")))
                if peer_url and peer_model
                else None,
                chrome_trace=chrome_trace,
                baseline_model=resolved_model(values.get("model")) if baseline else None,
            )
            results = output or Path("bench") / "results" / f"{name}.json"
            asyncio.run(run(settings, _with_model(values) if spawn else None, results, Console()))
        except BenchError as error:
            _fail(str(error), exit_codes.FAILED)


bench_app.command(name="serve")(with_flags(bench_serve, _SERVICE_FLAGS))


def bench_sharing(
    url: Annotated[str | None, typer.Option(help="gRPC address of a server [default: one is started]")] = None,
    numbers: Annotated[str, typer.Option("--numbers", "-n", help="of samples, beams, requests")] = "2,4,6",
    num_requests: Annotated[int, typer.Option(min=1, help="of each case")] = 8,
    num_system_tokens: Annotated[int, typer.Option(min=1, help="of the common system prompt")] = 341,
    seed: Annotated[int, typer.Option(help="of lengths and texts")] = 7,
    output: Annotated[Path, typer.Option(help="the plot lies beside it")] = Path("bench/results/sharing.json"),
    **values: Any,
) -> None:
    """Blocks saved by sharing, for samples, beams and a system prompt; prints a table, saves JSON and a plot."""
    from bench.command import BenchError, parse_concurrencies
    from bench.sharing import SharingSettings
    from bench.sharing_command import run
    from bench.sharing_work import all_cases

    with _reported():
        try:
            settings = SharingSettings(
                address=url or DEFAULT_ADDRESS,
                cases=tuple(all_cases(parse_concurrencies(numbers))),
                num_requests=num_requests,
                seed=seed,
                num_system_tokens=num_system_tokens,
            )
            asyncio.run(run(settings, None if url else _with_model(values), output, Console()))
        except BenchError as error:
            _fail(str(error), exit_codes.FAILED)


bench_app.command(name="sharing")(with_flags(bench_sharing, _SERVICE_FLAGS))


def bench_claims(
    only: Annotated[list[str] | None, typer.Option(help="the name of a claim; may be repeated [default: all]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="in small, to see that everything works")] = False,
    seed: Annotated[int, typer.Option(help="of lengths, prompts and samples")] = 7,
    source: Annotated[
        Path | None, typer.Option("--from", help="write the report of this results.json; measure nothing")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="directory [default: bench/results/claims]")] = None,
    evidence: Annotated[
        Path | None, typer.Option(help="[default: docs/evidence.md, or evidence.md in --output]")
    ] = None,
    **values: Any,
) -> None:
    """Measures what is claimed of paged KV memory and continuous batching; writes a report with verdicts and plots."""
    from bench.command import BenchError

    with _reported():
        try:
            from bench.claims.command import EVIDENCE, OUTPUT, ClaimsRun, measure, rewrite
        except ModuleNotFoundError as error:
            _fail(f"{error}; pip install 'quire[executor,bench,dev]' brings all that is measured", exit_codes.FAILED)
        page = evidence or (output / "evidence.md" if output else EVIDENCE)
        try:
            if source is not None:
                rewrite(source, output or OUTPUT, page, Console())
                return
            flags = _with_model(values)
            run = ClaimsRun(flags.pop("model"), tuple(only or ()), quick, seed, output or OUTPUT, page, flags)
            is_complete = measure(run, Console())
        except BenchError as error:
            _fail(str(error), exit_codes.FAILED)
        if not is_complete:
            _fail("a measurement failed; the report says which, and why", exit_codes.FAILED)


bench_app.command(name="claims")(with_flags(bench_claims, _MODEL_FLAGS))


def bench_prediction(
    url: Annotated[str | None, typer.Option(help="gRPC address of a server [default: one is started]")] = None,
    fitted: Annotated[str, typer.Option(help="numbers of clients to fit the cost model to")] = "1,8,32",
    predicted: Annotated[str, typer.Option(help="numbers of clients to try it on")] = "4,16,64",
    num_requests: Annotated[int | None, typer.Option(min=1, help="of each run; default 6 a client")] = None,
    seed: Annotated[int, typer.Option(help="of the traces")] = 7,
    lengths: Annotated[LengthMix, typer.Option(help="of prompts and outputs")] = LengthMix.MIXED,
    output: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/prediction.json"),
    **values: Any,
) -> None:
    """Throughput as simulated beside throughput as measured: a cost model fitted to some runs, tried on others."""
    from bench.command import BenchError, parse_concurrencies
    from bench.prediction import PredictionSettings
    from bench.prediction_command import run

    with _reported():
        try:
            settings = PredictionSettings(
                address=url or DEFAULT_ADDRESS,
                fitted=parse_concurrencies(fitted),
                predicted=parse_concurrencies(predicted),
                num_requests=num_requests,
                seed=seed,
                lengths=lengths.value,
            )
            asyncio.run(run(settings, None if url else _with_model(values), output, Console()))
        except BenchError as error:
            _fail(str(error), exit_codes.FAILED)


bench_app.command(name="prediction")(with_flags(bench_prediction, _SERVICE_FLAGS))


def plan(
    model: Annotated[str, typer.Argument(help="a model directory, a config.json, or a name such as llama-3.1-8b")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
    **values: Any,
) -> None:
    """Sizes a deployment from a model's config.json: weights, KV, blocks, sequences that fit, floors of a step."""
    from planning.command import run_plan

    with _reported():
        run_plan(model, DeploymentSettings(**given(values)), Console(), as_json=as_json)


def simulate(
    model: Annotated[str, typer.Argument(help="a model directory, a config.json, or a name such as llama-3.1-8b")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, with samples over time")] = False,
    **values: Any,
) -> None:
    """Runs the scheduler on a virtual clock, with a device of which the data sheet or measured steps are known."""
    from planning.command import run_simulate

    with _reported():
        run_simulate(model, SimulateSettings(**given(values)), Console(), as_json=as_json)


app.command()(with_flags(plan, flag_parameters(DeploymentSettings)))
app.command()(with_flags(simulate, flag_parameters(SimulateSettings)))


def _with_model(values: dict[str, Any]) -> dict[str, Any]:
    return given(values) | {"model": resolved_model(values.get("model"))}


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
            _fail(f"--logit-bias: expected ID=VALUE, not {entry!r}", exit_codes.USAGE)
    return biases


def _prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat and system is None:
        return text
    before = [ChatMessage("system", system)] if system is not None else []
    return [*before, ChatMessage("user", text)]


def _say(line: str) -> None:
    print(line, flush=True)


def _log_to_stderr(log_format: str) -> LogSink:
    """Prints each line behind the name of the child that wrote it; where children log as JSON, as JSON too."""
    if log_format == "json":
        from quire.logs import as_json_line

        return lambda name, line: print(as_json_line(name, line), file=sys.stderr, flush=True)
    console = Console(stderr=True, highlight=False)
    styles = {"scheduler": "cyan", "executor": "magenta", "supervisor": "yellow"}

    def log(name: str, line: str) -> None:
        console.print(Text.assemble((f"{name:>10} | ", styles.get(name, "")), line), soft_wrap=True)

    return log


@contextmanager
def _reported() -> Iterator[None]:
    """Expected errors become a line on standard error (for wrong fields, one each) and an exit code; bugs keep their
    traceback."""
    try:
        yield
    except InvalidRequestError as error:
        listed = "".join(f"\n  {field}: {problem}" for field, problem in error.violations.items())
        _fail(f"the request was refused{listed}" if listed else str(error), exit_codes.exit_code(error))
    except QuireError as error:
        _fail(str(error), exit_codes.exit_code(error))
    except (ConfigError, ModelNotFound, PlanningError) as error:
        _fail(str(error), exit_codes.USAGE)
    except AddressInUse as error:
        _fail(str(error), exit_codes.ADDRESS_IN_USE)
    except ChildFailed as failure:
        _fail(str(failure), failure.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(exit_codes.INTERRUPTED) from None


def _fail(message: str, code: int) -> NoReturn:
    print(f"quire: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
