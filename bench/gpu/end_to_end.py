"""Both services on a model of random weights: one stream, a full batch of long contexts, and clients in a closed loop.

    python -m bench gpu-serving --shape llama-3.1-8b --device cuda --json FILE

The services are those of `quire serve`. Weights are drawn on the device (`--load-format random`), because the speed of
a shape does not depend on its weights. The results are written after each part. On a GPU with little memory the batch
and the lengths are smaller, and a shape that does not fit is skipped (`bench.gpu.scales`).
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.gpu.random_models import phase_arguments, write_model
from bench.gpu.scales import NotHere, Scale, scale_on
from bench.load import LoadResult, closed_loop, quire_sender
from bench.report import save
from bench.server_process import as_flags, quire_server
from bench.serving.engines import quire_engine
from bench.serving.measurer import Turn
from bench.serving.measurer import measure as measure_turns
from bench.step_traces import StepRecorder, idle_ratio
from bench.trace import TraceRequest, TraceSettings, describe, make_trace
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace


def service_flags(shape: str, directory: Path, device: str, scale: Scale) -> list[str]:
    """Returns flags of `quire serve` for a model with random weights, which is written to `directory`."""
    values: dict[str, Any] = {
        "model": str(write_model(shape, directory)),
        "model_name": shape,
        "load_format": "random",
        "device": device,
        "max_model_len": scale.max_model_len,
        "metrics_address": "",
        "log_level": "warning",
    }
    if scale.max_num_batched_tokens is not None:
        values |= {"max_num_batched_tokens": scale.max_num_batched_tokens, "max_num_seqs": scale.batch_size}
    if device == "cpu":
        values |= {"num_blocks": 512, "num_threads": 1, "max_num_seqs": scale.batch_size}
    return as_flags(values)


async def measure(flags: Sequence[str], scale: Scale, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Starts the services with `flags`, measures, ends them. `keep` takes the results after each part.

    Raises ServerFailed if a service fails, LoadError and QuireError if a request fails.
    """
    report: dict[str, Any] = {"scale": asdict(scale)}
    started_s = time.monotonic()
    async with quire_server(flags, log=lambda line: print(line, flush=True)) as server:
        report["start_to_ready_s"] = time.monotonic() - started_s
        async with AsyncClient(server.addresses["grpc"], resume_timeout_s=0) as client:
            info = await client.server_info()
            report["server"] = asdict(info)
            keep(report)
            for name, part in (("single", _single), ("batch", _batch), ("closed_loop", _closed_loop)):
                report[name] = await part(client, info, scale)
                keep(report)
    return report


async def _single(client: AsyncClient, info: ServerInfo, scale: Scale) -> dict[str, Any]:
    """Measures one client, request after request. The first request triggers one-time work and is not counted."""
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
    """Measures the steps in which all sequences decode at once, after a short batch that warms up."""
    send = quire_sender(client)
    warm_up = _prompts(info, scale.batch_size, 8, 8, seed=2)
    await closed_loop(send, warm_up, scale.batch_size)
    trace = _prompts(info, scale.batch_size, scale.batch_prompt_tokens, scale.batch_output_tokens, seed=3)
    async with StepRecorder(client) as recorder:
        result = await closed_loop(send, trace, scale.batch_size)
    return _counts(result) | {"step": describe_steps(decode_steps(recorder.steps, scale.batch_size))}


async def _closed_loop(client: AsyncClient, info: ServerInfo, scale: Scale) -> dict[str, Any]:
    turn = closed_loop_turn(info.vocab_size, scale)
    (run,) = await measure_turns([quire_engine(client, pool_interval_s=None)], [turn])
    described = describe(turn.trace, make_trace(turn.trace))
    return asdict(run.summary) | {"num_steps": len(run.observed.steps), "trace": described}


def closed_loop_turn(vocab_size: int, scale: Scale) -> Turn:
    """Returns the turn of the closed loop, which is the same for every engine that serves the shape."""
    trace = TraceSettings(
        num_requests=scale.num_requests, vocab_size=vocab_size, max_model_len=scale.max_model_len, seed=64
    )
    return Turn(0, scale.num_clients, trace)


def decode_steps(steps: Sequence[StepTrace], num_sequences: int) -> list[StepTrace]:
    """Returns the longest run of consecutive steps that compute one token for each of `num_sequences` sequences."""
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
    """Returns the median times between commits and of executor work, and the idle ratio; None if unknown."""
    periods_ms = [(later.committed_ns - earlier.committed_ns) / 1e6 for earlier, later in pairwise(steps)]
    return {
        "num_steps": len(steps),
        "period_ms": statistics.median(periods_ms) if periods_ms else None,
        "busy_ms": statistics.median(step.busy_ns / 1e6 for step in steps) if steps else None,
        "idle_ratio": idle_ratio(steps),
    }


def _prompts(info: ServerInfo, count: int, num_tokens: int, max_tokens: int, seed: int) -> list[TraceRequest]:
    """Returns prompts without shared prefixes: token ids of a trace, cut or repeated to one length."""
    drawn = make_trace(TraceSettings(count, info.vocab_size, info.max_model_len, seed))
    return [
        TraceRequest((request.prompt_token_ids * num_tokens)[:num_tokens], max_tokens)  # each prompt has an id
        for request in drawn
    ]


def _counts(result: LoadResult) -> dict[str, Any]:
    return {
        "num_requests": len(result.records),
        "num_prompt_tokens": sum(record.num_prompt_tokens for record in result.records),
        "num_output_tokens": sum(record.num_output_tokens for record in result.records),
        "num_cached_tokens": result.num_cached_tokens,
        "wall_s": result.wall_s,
    }


def main(arguments: Sequence[str]) -> None:
    given = phase_arguments("gpu-serving", __doc__, arguments)
    try:
        scale = scale_on(given.device, given.shape, is_small=given.small)
    except NotHere as error:
        save(given.json, {"skipped_because": str(error)})
        return
    with tempfile.TemporaryDirectory() as directory:
        flags = service_flags(given.shape, Path(directory), given.device, scale)
        asyncio.run(measure(flags, scale, lambda report: save(given.json, report)))
