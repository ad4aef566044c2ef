"""Both services on a model of random weights: one stream, a full batch of long contexts, and clients in a closed loop.

    python -m bench.end_to_end --shape llama-3.1-8b --device cuda --json FILE

The services are the real ones, processes under the supervisor; weights are drawn on the device (`--load-format
random`), since how fast a shape is does not depend on what its weights are. What has been measured is written after
each part.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.load import LoadResult, closed_loop, quire_sender
from bench.random_models import phase_arguments, write_model
from bench.report import save, summarize
from bench.spawned import beside_services
from bench.step_traces import StepRecorder, idle_ratio
from bench.trace import TraceRequest, TraceSettings, describe, make_trace
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace
from quire.cli.services import ServicePair, on_free_ports, service_pair


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work each part is. Lengths in tokens.

    batch_*  sequences that decode together: prompts all differ, and end so that the contexts' mean is the one wanted
    """

    single_prompt_tokens: int
    single_output_tokens: int
    num_singles: int
    batch_size: int
    batch_prompt_tokens: int
    batch_output_tokens: int
    num_clients: int
    num_requests: int
    max_model_len: int


FULL = Scale(128, 128, 4, 64, 960, 129, 64, 192, 4096)
IN_SMALL = Scale(16, 8, 2, 4, 24, 12, 4, 8, 256)


def services(shape: str, directory: Path, device: str, scale: Scale) -> ServicePair:
    """On free ports, with random weights of a shape."""
    values: dict[str, Any] = {
        "model": str(write_model(shape, directory)),
        "model_name": shape,
        "load_format": "random",
        "device": device,
        "max_model_len": scale.max_model_len,
        "metrics_address": "",
    }
    if device == "cpu":
        values |= {"num_blocks": 512, "num_threads": 1, "max_num_seqs": scale.batch_size}
    return service_pair(on_free_ports(values))


async def measure(pair: ServicePair, scale: Scale, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Starts the services, measures, ends them. `keep` is given what is known after each part.

    Raises ChildFailed where a service fails, LoadError and QuireError where a request does.
    """
    report: dict[str, Any] = {}
    started_s = time.monotonic()

    async def all_parts() -> None:
        report["start_to_ready_s"] = time.monotonic() - started_s
        async with AsyncClient(pair.scheduler.listen) as client:
            info = await client.server_info()
            report["server"] = asdict(info)
            keep(report)
            for name, part in (("single", _single), ("batch", _batch), ("closed_loop", _closed_loop)):
                report[name] = await part(client, info, scale)
                keep(report)

    await beside_services(pair, all_parts, Console(quiet=True), log=_print_line)
    return report


async def _single(client: AsyncClient, info: ServerInfo, scale: Scale) -> dict[str, Any]:
    """One client, request after request; the first one pays for what is done lazily, and is not counted."""
    trace = _prompts(info, scale.num_singles + 1, scale.single_prompt_tokens, scale.single_output_tokens, seed=1)
    send = quire_sender(client)
    await closed_loop(send, trace[:1], 1)
    async with StepRecorder(client) as recorder:
        result = await closed_loop(send, trace[1:], 1)
    tpots_ms = [record.tpot_s * 1e3 for record in result.records if record.tpot_s is not None]
    return _counts(result) | {
        "tpot_ms": statistics.median(tpots_ms),
        "ttft_ms": statistics.median(record.ttft_s * 1e3 for record in result.records),
        "step": describe_steps(decode_steps(recorder.steps, 1)),
    }


async def _batch(client: AsyncClient, info: ServerInfo, scale: Scale) -> dict[str, Any]:
    """All sequences at once; what counts are the steps in which each of them decodes. A first, short one warms up."""
    send = quire_sender(client)
    warm_up = _prompts(info, scale.batch_size, 8, 8, seed=2)
    await closed_loop(send, warm_up, scale.batch_size)
    trace = _prompts(info, scale.batch_size, scale.batch_prompt_tokens, scale.batch_output_tokens, seed=3)
    async with StepRecorder(client) as recorder:
        result = await closed_loop(send, trace, scale.batch_size)
    return _counts(result) | {"step": describe_steps(decode_steps(recorder.steps, scale.batch_size))}


async def _closed_loop(client: AsyncClient, info: ServerInfo, scale: Scale) -> dict[str, Any]:
    settings = trace_settings(info.vocab_size, scale)
    trace = make_trace(settings)
    await client.reset_prefix_cache()
    async with StepRecorder(client) as recorder:
        result = await closed_loop(quire_sender(client), trace, scale.num_clients)
    summary = asdict(summarize("quire", result, steps=recorder.steps))
    return summary | {"num_steps": len(recorder.steps), "trace": describe(settings, trace)}


def trace_settings(vocab_size: int, scale: Scale) -> TraceSettings:
    """Of the closed loop: the same for every engine that serves the shape."""
    return TraceSettings(
        num_requests=scale.num_requests, vocab_size=vocab_size, max_model_len=scale.max_model_len, seed=64
    )


def decode_steps(steps: Sequence[StepTrace], num_sequences: int) -> list[StepTrace]:
    """The longest run of consecutive steps that compute one token for each of so many sequences."""
    longest: list[StepTrace] = []
    run: list[StepTrace] = []
    for step in steps:
        fits = step.num_sequences == step.num_tokens == num_sequences
        if fits and run and step.step_id == run[-1].step_id + 1:
            run.append(step)
        else:
            run = [step] if fits else []
        longest = max(longest, run, key=len)
    return longest


def describe_steps(steps: Sequence[StepTrace]) -> dict[str, Any]:
    """Time from one commit to the next, time the executor says it was busy, and its idle share; None where unknown."""
    periods_ms = [(later.committed_ns - earlier.committed_ns) / 1e6 for earlier, later in pairwise(steps)]
    return {
        "num_steps": len(steps),
        "period_ms": statistics.median(periods_ms) if periods_ms else None,
        "busy_ms": statistics.median(step.busy_ns / 1e6 for step in steps) if steps else None,
        "idle_ratio": idle_ratio(steps),
    }


def _prompts(info: ServerInfo, count: int, num_tokens: int, max_tokens: int, seed: int) -> list[TraceRequest]:
    """Prompts that share nothing: the trace's own ids, cut or repeated to one length."""
    drawn = make_trace(TraceSettings(count, info.vocab_size, info.max_model_len, seed))
    return [
        TraceRequest((request.prompt_token_ids * num_tokens)[:num_tokens], max_tokens)  # each has one id at least
        for request in drawn
    ]


def _counts(result: LoadResult) -> dict[str, Any]:
    return {
        "num_requests": len(result.records),
        "num_prompt_tokens": sum(record.num_prompt_tokens for record in result.records),
        "num_output_tokens": sum(record.num_output_tokens for record in result.records),
        "num_cached_tokens": sum(record.num_cached_tokens for record in result.records),
        "wall_s": result.wall_s,
    }


def _print_line(name: str, line: str) -> None:
    print(f"{name}: {line}", flush=True)


def main() -> None:
    given = phase_arguments(__doc__)
    scale = IN_SMALL if given.small else FULL
    with tempfile.TemporaryDirectory() as directory:
        pair = services(given.shape, Path(directory), given.device, scale)
        asyncio.run(measure(pair, scale, lambda report: save(given.json, report)))


if __name__ == "__main__":
    main()
