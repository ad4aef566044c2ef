"""`quire bench …`: the commands that measure. What they do is in `bench`, and loaded when it is asked for."""

import asyncio
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quire.channel import DEFAULT_ADDRESS
from quire.cli import exit_codes
from quire.cli.config_flags import with_flags
from quire.cli.outcome import fail, reported
from quire.cli.service_flags import MODEL_FLAGS, SERVICE_FLAGS, with_model
from quire.model_path import resolved_model

app = typer.Typer(help="Measure.", no_args_is_help=True)


class LengthMix(StrEnum):
    """How long prompts and outputs are."""

    MIXED = "mixed"
    SHAREGPT = "sharegpt"


class Baseline(StrEnum):
    """What to compare with, in this process."""

    TRANSFORMERS = "transformers"


@contextmanager
def _measuring() -> Iterator[None]:
    """As `reported`, and a measurement that fails is a line too."""
    from bench.command import BenchError

    with reported():
        try:
            yield
        except BenchError as error:
            fail(str(error), exit_codes.FAILED)


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
    rest_s: Annotated[float, typer.Option(min=0, help="between a started server's `ready` and its load")] = 10.0,
    name: Annotated[str, typer.Option(help="of the results' file")] = "serve",
    chrome_trace: Annotated[Path | None, typer.Option(help="save each run's steps for chrome://tracing")] = None,
    output: Annotated[Path | None, typer.Option(help="default: bench/results/NAME.json")] = None,
    **values: Any,
) -> None:
    """Closed-loop load with a seeded trace of mixed lengths; prints a table and saves JSON."""
    from bench.command import parse_concurrencies, run
    from bench.serve import BenchSettings, Peer

    if bool(peer_url) != bool(peer_model):
        fail("--peer-url and --peer-model go together", exit_codes.USAGE)
    if peer_command and not peer_url:
        fail("--peer-command needs --peer-url", exit_codes.USAGE)
    with _measuring():
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
            rest_s=rest_s,
            baseline_model=resolved_model(values.get("model")) if baseline else None,
        )
        results = output or Path("bench") / "results" / f"{name}.json"
        asyncio.run(run(settings, with_model(values) if spawn else None, results, Console()))


app.command(name="serve")(with_flags(bench_serve, SERVICE_FLAGS))


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
    from bench.command import parse_concurrencies
    from bench.sharing import SharingSettings
    from bench.sharing_command import run
    from bench.sharing_work import all_cases

    with _measuring():
        settings = SharingSettings(
            address=url or DEFAULT_ADDRESS,
            cases=tuple(all_cases(parse_concurrencies(numbers))),
            num_requests=num_requests,
            seed=seed,
            num_system_tokens=num_system_tokens,
        )
        asyncio.run(run(settings, None if url else with_model(values), output, Console()))


app.command(name="sharing")(with_flags(bench_sharing, SERVICE_FLAGS))


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
    with _measuring():
        try:
            from bench.claims.command import EVIDENCE, OUTPUT, ClaimsRun, measure, rewrite
        except ModuleNotFoundError as error:
            fail(f"{error}; pip install 'quire[executor,bench,dev]' brings all that is measured", exit_codes.FAILED)
        page = evidence or (output / "evidence.md" if output else EVIDENCE)
        if source is not None:
            rewrite(source, output or OUTPUT, page, Console())
            return
        flags = with_model(values)
        run = ClaimsRun(flags.pop("model"), tuple(only or ()), quick, seed, output or OUTPUT, page, flags)
        if not measure(run, Console()):
            fail("a measurement failed; the report says which, and why", exit_codes.FAILED)


app.command(name="claims")(with_flags(bench_claims, MODEL_FLAGS))


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
    from bench.command import parse_concurrencies
    from bench.prediction import PredictionSettings
    from bench.prediction_command import run

    with _measuring():
        settings = PredictionSettings(
            address=url or DEFAULT_ADDRESS,
            fitted=parse_concurrencies(fitted),
            predicted=parse_concurrencies(predicted),
            num_requests=num_requests,
            seed=seed,
            lengths=lengths.value,
        )
        asyncio.run(run(settings, None if url else with_model(values), output, Console()))


app.command(name="prediction")(with_flags(bench_prediction, SERVICE_FLAGS))
