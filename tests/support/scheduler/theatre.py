"""A scheduler whose executor answers when told to, and whose metrics count steps instead of seconds.

All of it is real but the executor. The pool has 8 blocks of 4 tokens; `Theatre.added` says what every counter and
histogram has gained since it was asked last.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from quire.v1 import generation_pb2 as wire
from scheduler.core import QuireError, StepPlan
from scheduler.engine.engine import Engine
from scheduler.engine.options import EngineOptions
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.incoming import IncomingRequest, Sampling, Stopping
from scheduler.requests.intake import Intake, ServedModel
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient, FakeStream

NUM_BLOCKS = 8
VOCABULARY = range(DESCRIPTION.vocab_size)

Counts = dict[str, float]


class SteppedClient(FakeClient):
    """Its executor computes a plan at once, and keeps the result until `step`."""

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

    def open_stream(self, on_arrival: Callable[[], None]) -> FakeStream:
        super().open_stream(on_arrival)
        self.stream = SteppedStream(self, on_arrival)
        return self.stream


class SteppedStream(FakeStream):
    async def send(self, plan: StepPlan) -> None:
        result = self.executor.execute(plan)
        client = self._client
        assert isinstance(client, SteppedClient)
        client.held.append(lambda: self._arrive(result))


@dataclass
class Client:
    """Takes every message at once. `error` is what ended its stream, if not its end."""

    task: asyncio.Task[None] | None = None
    messages: list[wire.GenerateResponse] = field(default_factory=list)
    error: QuireError | None = None

    @property
    def token_ids(self) -> dict[int, list[int]]:
        """By sequence."""
        found: dict[int, list[int]] = {}
        for message in self.messages:
            if message.HasField("delta"):
                found.setdefault(message.delta.index, []).extend(message.delta.token_ids)
        return found


class Theatre:
    """The scheduler, its executor, and its clients."""

    def __init__(self, client: SteppedClient, engine: Engine, intake: Intake, metrics: SchedulerMetrics) -> None:
        self.client = client
        self.engine = engine
        self.intake = intake
        self.metrics = metrics
        self.now_s = 0.0
        self._seen: Counts = {}

    async def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        deadline_s: float | None = None,
        sampling: Sampling = Sampling(seed=1),  # noqa: B008  (a frozen value)
        stopping: Stopping | None = None,
    ) -> Client:
        stopping = replace(stopping or Stopping(ignore_eos=True), max_tokens=max_tokens)
        incoming = IncomingRequest(token_ids=prompt, sampling=sampling, stopping=stopping)
        client = Client()

        async def take() -> None:
            try:
                async with self.intake.open(incoming, deadline_s) as stream:
                    async for message in stream.messages():
                        client.messages.append(message)
            except QuireError as error:
                client.error = error

        client.task = asyncio.create_task(take())
        return client

    async def quiet(self) -> None:
        """Until nobody has anything to do, but for what is held: no thread and no socket takes part."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def step(self, times: int = 1) -> None:
        await self.quiet()
        for _ in range(times):
            assert self.client.held, "no plan is out"
            self.now_s += 1
            self.client.held.popleft()()
            await self.quiet()

    async def leave(self, client: Client) -> None:
        assert client.task is not None
        client.task.cancel()
        with suppress(asyncio.CancelledError):
            await client.task
        await self.quiet()

    async def lose_executor(self) -> None:
        """And have it back, after the engine's pause."""
        epoch = self.engine.core.state.epoch if self.engine.core else 0
        self.client.lose()
        while self.engine.core is None or self.engine.core.state.epoch == epoch:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await self.quiet()

    def added(self) -> Counts:
        """What has changed since the last call: counters, and counts and sums of histograms."""
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


UNCOUNTED = "schedule_duration_seconds_sum"
"""What the core really took: the only number here that is not decided by the script."""


def short(name: str, labels: dict[str, str]) -> str:
    own = [value for label, value in labels.items() if label not in ("model_name", "service", "version")]
    return "/".join([name.removeprefix("quire_").removesuffix("_total"), *own])


def steps(*num_tokens: int) -> Counts:
    """Plans of so many tokens each."""
    return {
        "step_batch_tokens_count": len(num_tokens),
        "step_batch_tokens_sum": sum(num_tokens),
        "schedule_duration_seconds_count": len(num_tokens),
    }


def prompt_tokens(num_tokens: int, num_cached: int = 0) -> Counts:
    """Of requests that were started: looked up, and found or not; each counts once."""
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
    """Without what is nothing."""
    counts: Counts = {}
    for part in parts:
        for name, value in part.items():
            counts[name] = counts.get(name, 0) + value
    return {name: value for name, value in counts.items() if value}


@asynccontextmanager
async def opened(checkpoint: Checkpoint) -> AsyncIterator[Theatre]:
    client = SteppedClient()
    theatre: Theatre
    metrics = SchedulerMetrics(clock=lambda: theatre.now_s)
    engine = Engine(
        client, EngineOptions(max_in_flight=1, max_waiting_requests=2), on_plan=lambda _, *plan: metrics.planned(*plan)
    )
    metrics.engine = engine
    tokenizer = Tokenizer.load(checkpoint)
    model = ServedModel(tokenizer, None, GenerationDefaults(eos_token_ids=tuple(VOCABULARY)))
    theatre = Theatre(client, engine, Intake(engine, model, metrics), metrics)
    running = asyncio.create_task(engine.run())
    await engine.described()
    await theatre.quiet()
    yield theatre
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    tokenizer.close()


async def ended(client: Client) -> Client:
    """With an error."""
    assert client.task is not None
    await asyncio.wait_for(client.task, 30)
    assert client.error is not None
    return client
