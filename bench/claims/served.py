"""Runs on real services: a pair of them for each way in which a claim wants them to be run."""

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from rich.console import Console

from bench.claims.claim import Data, Setting
from bench.load import RequestRecord, Send, closed_loop, quire_sender
from bench.pool_sampler import PoolSampler
from bench.report import summarize
from bench.spawned import beside_services
from bench.step_traces import StepRecorder
from bench.trace import TraceRequest, TraceSettings, make_trace
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace
from quire.cli.services import on_free_ports, service_pair

T = TypeVar("T")

_SAMPLE_INTERVAL_S = 0.05
_MAX_CURVE_POINTS = 800
_WARM_UP_TOKENS = 16
_NUM_WARM_UP_REQUESTS = 4


def device_of(flags: Mapping[str, Any]) -> torch.device:
    """What the executor takes when it is given these flags."""
    chosen = flags.get("device", "auto")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if chosen == "auto" else chosen)


async def at_services(
    setting: Setting, flags: Mapping[str, Any], measure: Callable[[str], Coroutine[Any, Any, T]]
) -> T:
    """Starts both services with `flags`, measures at their address, ends them. Raises ChildFailed where one fails."""
    pair = service_pair(on_free_ports({**setting.flags, **flags, "model": setting.model}))
    return await beside_services(pair, lambda: measure(pair.scheduler.listen), Console(quiet=True))


async def with_services(
    setting: Setting, flags: Mapping[str, Any], measure: Callable[[AsyncClient], Coroutine[Any, Any, T]]
) -> T:
    """The same through one client."""

    async def connected(address: str) -> T:
        async with AsyncClient(address) as client:
            return await measure(client)

    return await at_services(setting, flags, connected)


@dataclass(frozen=True, slots=True)
class Served:
    """One run. summary: of `bench.report`. steps: the last thousands of them. outputs: a digest of each request's."""

    summary: Data
    steps: tuple[StepTrace, ...]
    outputs: dict[tuple[int, ...], str]

    @property
    def mean_batch(self) -> float:
        """Sequences of a step, in the mean."""
        return statistics.fmean(step.num_sequences for step in self.steps) if self.steps else 0.0

    @property
    def max_batch(self) -> int:
        return max((step.num_sequences for step in self.steps), default=0)

    @property
    def mean_step_ms(self) -> float:
        return statistics.fmean(step.busy_ns for step in self.steps) / 1e6 if self.steps else 0.0

    def curve(self) -> Data:
        """Sequences of a step, against seconds since the first one was planned; of a long run, every so many."""
        chosen = self.steps[:: 1 + len(self.steps) // _MAX_CURVE_POINTS]
        return {
            "seconds": [round((step.planned_ns - chosen[0].planned_ns) / 1e9, 4) for step in chosen],
            "num_sequences": [step.num_sequences for step in chosen],
        }

    def row(self) -> Data:
        """What claims keep of it."""
        kept = ("concurrency", "num_requests", "wall_s", "requests_per_s", "output_tokens_per_s")
        return {name: self.summary[name] for name in kept} | {
            "ttft_p50_ms": (self.summary["ttft_ms"] or {}).get("p50"),
            "latency_p50_ms": (self.summary["latency_ms"] or {}).get("p50"),
            "mean_batch": self.mean_batch,
            "max_batch": self.max_batch,
            "mean_step_ms": self.mean_step_ms,
            "num_steps": len(self.steps),
            "waste_ratio": self.summary["pool"]["mean_waste_ratio"],
            "num_preemptions": self.summary["pool"]["num_preemptions"],
        }


async def run_load(client: AsyncClient, trace: Sequence[TraceRequest], num_clients: int) -> Served:
    """The trace in a closed loop, on a pool that remembers nothing. Raises LoadError and QuireError."""
    outputs: dict[tuple[int, ...], str] = {}
    await client.reset_prefix_cache()
    async with StepRecorder(client) as recorder, PoolSampler(client, _SAMPLE_INTERVAL_S) as sampler:
        result = await closed_loop(_noting(quire_sender(client), outputs), trace, num_clients)
    return Served(asdict(summarize("quire", result, sampler.stats, recorder.steps)), recorder.steps, outputs)


async def warm_up(client: AsyncClient, trace: Sequence[TraceRequest]) -> None:
    """The first requests pay for compiling and for first touches."""
    short = [
        replace(request, max_tokens=min(request.max_tokens, _WARM_UP_TOKENS))
        for request in trace[:_NUM_WARM_UP_REQUESTS]
    ]
    await closed_loop(quire_sender(client), short, len(short))
    await asyncio.sleep(0)


def trace_for(
    setting: Setting, info: ServerInfo, num_requests: int, num_clients: int, lengths: str = "mixed"
) -> list[TraceRequest]:
    """The same for every server of one model; another for each number of clients."""
    return make_trace(
        TraceSettings(
            num_requests=num_requests,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            seed=setting.seed * 1_000_003 + num_clients,
            lengths=lengths,
        )
    )


def num_equal(one: Mapping[tuple[int, ...], str], other: Mapping[tuple[int, ...], str]) -> int:
    """Requests of both runs that were answered with the same tokens."""
    return sum(other.get(prompt) == digest for prompt, digest in one.items())


def _noting(send: Send, outputs: dict[tuple[int, ...], str]) -> Send:
    async def noted(request: TraceRequest) -> RequestRecord:
        record = await send(request)
        outputs[request.prompt_token_ids] = blake2b(repr(record.token_ids).encode(), digest_size=12).hexdigest()
        return record

    return noted
