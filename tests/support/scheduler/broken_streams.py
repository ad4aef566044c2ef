"""Streams that break off and are continued by another scheduler, and the comparison with undisturbed ones."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from quire.v1 import generation_pb2 as pb
from scheduler.engine.engine import Engine
from scheduler.engine.plan_wire import ExecutorDescription
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.servers.generation_server import read_fields
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.telemetry.request_observer import Caller
from scheduler.tenants.settings import Tenants
from scheduler.text.chat import ChatRenderer, load_template
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler.engine_rig import running_engine
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient

Messages = list[pb.GenerateResponse]

MODEL = replace(DESCRIPTION, vocab_size=382, weights_digest="weights")


@dataclass(frozen=True, slots=True)
class OneScheduler:
    """A scheduler with a fake executor, from `open_scheduler`."""

    intake: Intake
    engine: Engine
    client: FakeClient
    metrics: SchedulerMetrics

    async def messages(
        self,
        request: pb.GenerateRequest,
        *,
        pauses: Sequence[int] = (0,),
        most: int | None = None,
        tenant: str = "default",
    ) -> Messages:
        """Returns the messages of a stream, or its first ones. Between two of them the reader pauses for some turns of
        the event loop, in which more tokens arrive."""
        received: Messages = []
        async with self.intake.open(read_fields(request), Caller(tenant=tenant), None) as stream:
            async for message in stream.messages():
                received.append(message)
                if len(received) == most:
                    break
                for _ in range(pauses[len(received) % len(pauses)]):
                    await asyncio.sleep(0)
        return received


class Models:
    """The served checkpoint, loaded once for many schedulers."""

    def __init__(self, checkpoint: Checkpoint, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.tokenizer = Tokenizer.load(checkpoint)
        template = load_template(checkpoint)
        variables, tokens = self.tokenizer.special_tokens, self.tokenizer.control_tokens
        chat = ChatRenderer(template, variables, tokens=tokens) if template else None
        self.served = ServedModel(self.tokenizer, chat, GenerationDefaults(eos_token_ids=eos_token_ids))

    @asynccontextmanager
    async def open_scheduler(
        self, description: ExecutorDescription = MODEL, tenants: Tenants | None = None, **options: Any
    ) -> AsyncIterator[OneScheduler]:
        """Runs a scheduler that knows nothing of any stream."""
        client, metrics = FakeClient(description), SchedulerMetrics()
        async with running_engine(client, **options) as engine:
            metrics.engine = engine
            yield OneScheduler(Intake(engine, self.served, metrics, tenants=tenants), engine, client, metrics)

    async def close(self) -> None:
        self.tokenizer.close()
        if self.served.chat is not None:
            await self.served.chat.close()


def resumption(request: pb.GenerateRequest, received: Messages) -> pb.GenerateRequest:
    """Returns the request that continues a stream, by the rules of docs/protocol.md."""
    resumed = pb.GenerateRequest()
    resumed.CopyFrom(request)
    sequences: dict[int, pb.ResumedSequence] = {}
    for message in received:
        if message.HasField("started"):
            resumed.resume.continuation.CopyFrom(message.started.continuation)
            resumed.request_id = message.started.request_id
        elif message.HasField("prompt_logprobs"):
            resumed.resume.num_prompt_logprobs += len(message.prompt_logprobs.tokens)
        else:
            part = message.delta if message.HasField("delta") else message.finished
            sequence = sequences.setdefault(part.index, pb.ResumedSequence(index=part.index))
            if isinstance(part, pb.Delta):
                sequence.token_ids.extend(part.token_ids)
                sequence.has_last = part.last
            else:
                sequence.finished = True
    resumed.resume.sequences.extend(sequences.values())
    return resumed


def content(messages: Messages) -> dict[str, Any]:
    """Returns all that a client learns from the messages of one request, in one stream or several.

    Checks the order of the messages. The number of preemptions is left out.
    """
    started = [message.started for message in messages if message.HasField("started")]
    assert started, "no Started"
    assert all(each == started[0] for each in started), "the streams of a request start differently"
    found: dict[str, Any] = {"started": started[0], "prompt": []}
    for message in messages:
        if message.HasField("prompt_logprobs"):
            assert message.prompt_logprobs.first_position == len(found["prompt"]) + 1
            found["prompt"] += message.prompt_logprobs.tokens
        elif message.HasField("delta"):
            delta = message.delta
            text, token_ids, logprobs = found.setdefault(f"output {delta.index}", ("", [], []))
            assert f"end {delta.index}" not in found, "a Delta after the end"
            assert delta.text or delta.token_ids, "an empty Delta"
            found[f"output {delta.index}"] = (
                text + delta.text,
                [*token_ids, *delta.token_ids],
                [*logprobs, *delta.logprobs],
            )
        elif message.HasField("finished"):
            finished = message.finished
            assert f"end {finished.index}" not in found, "two ends"
            finished.usage.num_preemptions = 0
            found[f"end {finished.index}"] = finished
    return found
