"""Helpers that run an engine with a fake executor, and sinks that check the events that they receive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.core import FinishReason, Request, SequenceParams, TokenLogprobs
from scheduler.engine.engine import Engine
from scheduler.engine.executor_client import ExecutorClient
from scheduler.engine.options import EngineOptions, from_fields
from tests.support.core.fake_executor import expected_output
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient

# They end a request as a whole.
WHOLE_REQUEST = (
    FinishReason.ERROR,
    FinishReason.EXECUTORS_LOST,
    FinishReason.GRAMMAR,
    FinishReason.MODEL_CHANGED,
    FinishReason.NOT_FINITE,
)


class RecordingSink:
    """Keeps the events that it receives, and checks their order."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_cached_tokens: int | None = None
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.scores: dict[int, float | None] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt: list[TokenLogprobs] = []
        self.has_failed = False
        self.first_token = asyncio.Event()
        self.done = asyncio.Event()

    def started(self, num_cached_tokens: int) -> None:
        assert self.num_cached_tokens is None, "started twice"
        self.num_cached_tokens = num_cached_tokens

    def prompt_logprobs(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        assert not self.outputs, "prompt log-probabilities after the first token"
        assert first_position == len(self.prompt) + 1
        self.prompt += tokens

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        assert self.num_cached_tokens is not None, "tokens before started"
        assert logprobs is None or len(logprobs) == len(token_ids)
        self.logprobs.setdefault(index, []).extend(logprobs or [])
        assert index not in self.reasons, "tokens after the end"
        assert not self.has_failed, "tokens after the request failed"
        self.outputs.setdefault(index, []).extend(token_ids)
        self.first_token.set()

    def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
        if reason in WHOLE_REQUEST:
            self.has_failed = True
            self.done.set()
            self.reasons.setdefault(index, reason)
            return
        assert not self.has_failed, "finished after the request failed"
        assert index not in self.reasons, "finished twice"
        self.reasons[index] = reason
        self.scores[index] = score
        beam = self.request.beam
        if len(self.reasons) == (beam.num_returned if beam else self.request.num_sequences):
            self.done.set()

    async def check(self) -> None:
        """Waits for the end, and compares every sequence with its expected output."""
        await asyncio.wait_for(self.done.wait(), 20)
        for index, seed in enumerate(self.request.seeds):
            prompt = list(self.request.prompt_token_ids)
            expected = expected_output(prompt, self.request.params, seed, DESCRIPTION.vocab_size)
            assert (self.outputs[index], self.reasons[index]) == expected


def engine_options(**settings: Any) -> EngineOptions:
    """Returns the engine's default options, with other values for some of them."""
    return replace(from_fields(EngineOptions, SchedulerConfig(model="unused")), **settings)


@asynccontextmanager
async def running_engine(client: FakeClient | ExecutorClient, **options: Any) -> AsyncIterator[Engine]:
    engine = Engine(client, engine_options(**options))  # type: ignore[arg-type]  # a fake client has the same methods
    task = asyncio.create_task(engine.run())
    try:
        await asyncio.wait_for(engine.described(), 10)
        yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def submit(engine: Engine, prompt: list[int], max_tokens: int = 10, **fields: object) -> RecordingSink:
    request = Request(
        engine.new_request_id(),
        prompt,
        SequenceParams(max_total_tokens=len(prompt) + max_tokens),
        **fields,  # type: ignore[arg-type]
    )
    sink = RecordingSink(request)
    engine.submit(request, sink)
    return sink
