"""A request with a known answer, and scripts of servers whose streams of it break off."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

import quire
from quire import messages
from quire.v1.generation_pb2 import GenerateRequest, GenerateResponse
from tests.support.client.fake_generation import FakeGeneration
from tests.support.client.scripted_server import Script

SEQUENCES = [[11, 12, 13, 14, 15, 16], [21, 22, 23]]
SEED = 5


def answer() -> FakeGeneration:
    return FakeGeneration(SEQUENCES, num_prompt_logprobs=4, seed=SEED)


def expected() -> quire.Completion:
    assembler = messages.CompletionAssembler()
    fake = answer()
    request = fake.request()
    request.resumable = True
    for message in fake.stream(request):
        event = messages.event(message)
        assert event is not None
        assembler.add(event)
    return assembler.completion()


def breaking(num_breaks: int, num_messages: int, end: Any) -> Script:
    """Returns a script whose first streams end with `await end(context)` after this many messages."""
    fake, num_streams = answer(), 0

    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        nonlocal num_streams
        num_streams += 1
        is_last = num_streams > num_breaks
        responses = fake.stream(request)
        for response in responses if is_last else responses[:num_messages]:
            yield response
        if not is_last:
            await end(context)

    return script


async def unavailable(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining")


async def dropped(context: Any) -> None:
    """Ends the stream as gRPC does when the server's event loop ends before the call."""
    await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")


async def forever(context: Any) -> None:
    await asyncio.Event().wait()
