"""A scheduler whose executor answers when the test says so, and whose metrics count steps instead of seconds.

Everything but the executor is real. The pool has 8 blocks of 4 tokens. `ScriptedEngine.added` returns what the counters
and histograms have gained since the previous call.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire.v1 import generation_pb2 as pb
from scheduler.core import QuireError, StepPlan
from scheduler.engine.engine import Engine
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.requests.request_fields import RequestFields
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.telemetry.request_observer import Caller
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler.engine_rig import engine_options
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient, FakeStream
from tests.support.waiting import until

NUM_BLOCKS = 8
VOCABULARY = range(DESCRIPTION.vocab_size)

Counts = dict[str, float]

SEED_1: Mapping[str, Any] = {"seed": 1}
IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True}


class SteppedClient(FakeClient):
    """A client whose executor computes plans at once; `held` keeps the results until `ScriptedEngine.step`."""

    def __init__(self) -> None:
        super().__init__(
            replace(
                DESCRIPTION, num_blocks=NUM_BLOCKS + 1, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200
            )
        )
        self.held: deque[Callable[[], None]] = deque()

    def lose(self) -> None:
        super().lose()
        self.held.clear()

    async def open_stream(
        self, on_arrival: Callable[[], None], epoch: int, incarnation: str, timeout_s: float, **retention: object
    ) -> FakeStream:
        await super().open_stream(on_arrival, epoch, incarnation, timeout_s)
        self.stream = SteppedStream(self, on_arrival, epoch, self.num_streams)
        return self.stream


class SteppedStream(FakeStream):
    """A plan stream that computes each plan when it is sent, and delivers its result at the next step."""

    async def send(self, plan: StepPlan) -> None:
        result = self.executor.execute(plan)
        client = self._client
        assert isinstance(client, SteppedClient)
        client.held.append(lambda: self._arrive(result))


@dataclass
class Client:
    """A client that reads every message at once. `error` is the error that ended its stream, if any."""

    task: asyncio.Task[None] | None = None
    messages: list[pb.GenerateResponse] = field(default_factory=list)
    error: QuireError | None = None

    @property
    def token_ids(self) -> dict[int, list[int]]:
        """The received token ids of each sequence."""
        found: dict[int, list[int]] = {}
        for message in self.messages:
            if message.HasField("delta"):
                found.setdefault(message.delta.index, []).extend(message.delta.token_ids)
        return found


class ScriptedEngine:
    """The scheduler, its executor, and its clients."""

    def __init__(self, client: SteppedClient, engine: Engine, intake: Intake, metrics: SchedulerMetrics) -> None:
        self.client = client
        self.engine = engine
        self.intake = intake
        self.metrics = metrics
        self.now_s = 0.0
        self._seen = {name: value for name, value in self.counts().items() if name.startswith(OF_THE_PROCESS)}

    async def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        deadline_s: float | None = None,
        sampling: Mapping[str, Any] = SEED_1,
        stopping: Mapping[str, Any] = IGNORE_EOS,
    ) -> Client:
        """Sends a request, and returns its client."""
        values = {"token_ids.ids": prompt}
        values |= {f"sampling.{name}": value for name, value in sampling.items()}
        values |= {f"stopping.{name}": value for name, value in stopping.items()}
        fields = RequestFields(values | {"stopping.max_tokens": max_tokens})
        client = Client()

        async def take() -> None:
            try:
                async with self.intake.open(fields, Caller(), deadline_s) as stream:
                    async for message in stream.messages():
                        client.messages.append(message)
            except QuireError as error:
                client.error = error

        client.task = asyncio.create_task(take())
        return client

    async def quiet(self) -> None:
        """Returns when nothing can happen before the next step. No threads or sockets are involved."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def step(self, times: int = 1) -> None:
        """Delivers the result of the oldest plan, and lets the scheduler react; the clock advances by 1 s."""
        await self.quiet()
        for _ in range(times):
            assert self.client.held, "no plan is in flight"
            self.now_s += 1
            self.client.held.popleft()()
            await self.quiet()

    async def leave(self, client: Client) -> None:
        """Disconnects a client."""
        assert client.task is not None
        client.task.cancel()
        with suppress(asyncio.CancelledError):
            await client.task
        await self.quiet()

    async def lose_executor(self) -> None:
        """Loses the executor, and returns when the engine has connected to it again."""
        epoch = self.engine.core.state.epoch if self.engine.core else 0
        self.client.lose()
        await until(lambda: self.engine.core is not None and self.engine.core.state.epoch != epoch)
        await self.quiet()

    def added(self) -> Counts:
        """Returns what counters, and counts and sums of histograms, have gained since the last call."""
        now = self.counts()
        added = {name: value - self._seen.get(name, 0) for name, value in now.items()}
        self._seen = now
        return {name: value for name, value in added.items() if value}

    def counts(self) -> Counts:
        return {
            name: value
            for kind, name, value in self.samples()
            if kind in ("counter", "histogram") and not name.startswith(UNCOUNTED)
        }

    def gauges(self) -> Counts:
        return {name: value for kind, name, value in self.samples() if kind == "gauge"}

    def samples(self) -> list[tuple[str, str, float]]:
        return [
            (family.type, short(sample.name, sample.labels), sample.value)
            for family in text_string_to_metric_families(self.metrics.render().decode())
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        ]


UNCOUNTED = ("schedule_duration_seconds_sum", "tenant_")
"""The time that the core took, which the script does not determine, and metrics by tenant (test_tenant_families.py)."""


OF_THE_PROCESS = ("limited", "unexpected_errors")
"""Metrics that earlier tests of this process may have counted."""


def short(name: str, labels: dict[str, str]) -> str:
    own = [value for label, value in labels.items() if label not in ("model_name", "service", "version")]
    return "/".join([name.removeprefix("quire_").removesuffix("_total"), *own])


def steps(*num_tokens: int) -> Counts:
    """Counts of one plan for each number of tokens."""
    return {
        "step_batch_tokens_count": len(num_tokens),
        "step_batch_tokens_sum": sum(num_tokens),
        "schedule_duration_seconds_count": len(num_tokens),
    }


def prompt_tokens(num_tokens: int, num_cached: int = 0) -> Counts:
    """Counts of prompt tokens of started requests: each is looked up once, and found or not."""
    return {
        "prefix_cache_queries_tokens": num_tokens,
        "prefix_cache_hits_tokens": num_cached,
        "prompt_tokens/cached": num_cached,
        "prompt_tokens/computed": num_tokens - num_cached,
        "request_prompt_tokens_sum": num_tokens,
    }


def times(name: str, *seconds: float) -> Counts:
    return {f"{name}_seconds_count": len(seconds), f"{name}_seconds_sum": sum(seconds)}


def total(*parts: Counts) -> Counts:
    """Returns the sums of the parts, without zeros."""
    counts: Counts = {}
    for part in parts:
        for name, value in part.items():
            counts[name] = counts.get(name, 0) + value
    return {name: value for name, value in counts.items() if value}


@asynccontextmanager
async def open_scripted_engine(checkpoint: Checkpoint) -> AsyncIterator[ScriptedEngine]:
    client = SteppedClient()
    scripted_engine: ScriptedEngine
    metrics = SchedulerMetrics(clock=lambda: scripted_engine.now_s)
    engine = Engine(
        client, engine_options(max_in_flight=1, max_waiting_requests=2), on_plan=lambda _, *plan: metrics.planned(*plan)
    )
    metrics.engine = engine
    tokenizer = Tokenizer.load(checkpoint)
    model = ServedModel(tokenizer, None, GenerationDefaults(eos_token_ids=tuple(VOCABULARY)))
    scripted_engine = ScriptedEngine(client, engine, Intake(engine, model, metrics), metrics)
    running = asyncio.create_task(engine.run())
    await engine.described()
    await scripted_engine.quiet()
    yield scripted_engine
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    tokenizer.close()


async def ended(client: Client) -> Client:
    """Waits for a client whose stream ends with an error."""
    assert client.task is not None
    await asyncio.wait_for(client.task, 30)
    assert client.error is not None
    return client
