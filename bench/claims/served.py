"""Runs on real services, which are started with the flags of a claim."""

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from bench.claims.claim import Data, Setting
from bench.load import RequestRecord, Send, closed_loop, quire_sender
from bench.report import summarize
from bench.server_process import as_flags, quire_server
from bench.serving.engines import quire_engine
from bench.serving.measurer import shortened
from bench.trace import TraceRequest, TraceSettings, make_trace
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace

T = TypeVar("T")

_SAMPLE_INTERVAL_S = 0.05
_MAX_CURVE_POINTS = 800
_WARM_UP_TOKENS = 16
_NUM_WARM_UP_REQUESTS = 4


def device_of(flags: Mapping[str, Any]) -> torch.device:
    """Returns the device that the executor chooses with these flags."""
    chosen = flags.get("device", "auto")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if chosen == "auto" else chosen)


async def at_services(
    setting: Setting, flags: Mapping[str, Any], measure: Callable[[str], Coroutine[Any, Any, T]]
) -> T:
    """Starts both services with `flags`, which override the setting's, and measures at their address.

    Raises ServerFailed if a service fails.
    """
    values = {**setting.flags, **flags, "model": setting.model}
    async with quire_server(as_flags(values)) as server:
        return await measure(server.addresses["grpc"])


async def with_services(
    setting: Setting, flags: Mapping[str, Any], measure: Callable[[AsyncClient], Coroutine[Any, Any, T]]
) -> T:
    """Does the same as `at_services`, but measures through one client."""

    async def connected(address: str) -> T:
        async with AsyncClient(address, resume_timeout_s=0) as client:
            return await measure(client)

    return await at_services(setting, flags, connected)


@dataclass(frozen=True, slots=True)
class Served:
    """One run on real services.

    summary  a RunSummary as JSON values
    steps    the last few thousand steps
    outputs  a digest of each request's output, by prompt
    """

    summary: Data
    steps: tuple[StepTrace, ...]
    outputs: dict[tuple[int, ...], str]

    @property
    def mean_batch(self) -> float:
        """Mean number of sequences in a step."""
        return statistics.fmean(step.num_sequences for step in self.steps) if self.steps else 0.0

    @property
    def max_batch(self) -> int:
        return max((step.num_sequences for step in self.steps), default=0)

    @property
    def mean_step_ms(self) -> float:
        return statistics.fmean(step.busy_ns for step in self.steps) / 1e6 if self.steps else 0.0

    def curve(self) -> Data:
        """Returns sequences per step over seconds since the first step was planned; a long run is sampled."""
        chosen = self.steps[:: 1 + len(self.steps) // _MAX_CURVE_POINTS]
        return {
            "seconds": [round((step.planned_ns - chosen[0].planned_ns) / 1e9, 4) for step in chosen],
            "num_sequences": [step.num_sequences for step in chosen],
        }

    def row(self) -> Data:
        """Returns the figures that claims keep."""
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
    """Runs the trace in a closed loop, with an empty prefix cache. Raises LoadError and QuireError."""
    outputs: dict[tuple[int, ...], str] = {}
    send = _recording(quire_sender(client), outputs)
    observed = await quire_engine(client, pool_interval_s=_SAMPLE_INTERVAL_S, send=send).run(trace, num_clients)
    summary = summarize("quire", observed.load, observed.pool, observed.steps)
    return Served(asdict(summary), observed.steps, outputs)


async def warm_up(client: AsyncClient, trace: Sequence[TraceRequest]) -> None:
    """Sends short requests: the first ones pay for compilation and for memory that is touched first."""
    short = shortened(trace[:_NUM_WARM_UP_REQUESTS], _WARM_UP_TOKENS)
    await closed_loop(quire_sender(client), short, len(short))
    await asyncio.sleep(0)


def trace_for(setting: Setting, info: ServerInfo, num_requests: int, num_clients: int) -> list[TraceRequest]:
    """Returns a trace that depends only on the model and the number of clients."""
    return make_trace(
        TraceSettings(
            num_requests=num_requests,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            seed=setting.seed * 1_000_003 + num_clients,
        )
    )


def num_equal(one: Mapping[tuple[int, ...], str], other: Mapping[tuple[int, ...], str]) -> int:
    """Returns the number of requests that both runs answered with the same tokens."""
    return sum(other.get(prompt) == digest for prompt, digest in one.items())


def _recording(send: Send, outputs: dict[tuple[int, ...], str]) -> Send:
    async def recorded(request: TraceRequest) -> RequestRecord:
        record = await send(request)
        outputs[request.prompt_token_ids] = blake2b(repr(record.token_ids).encode(), digest_size=12).hexdigest()
        return record

    return recorded
