"""Streams of the real model continue with exactly the tokens, texts and log-probabilities that they lack."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from tests.support.e2e.stack import Stack
from tests.support.scheduler.broken_streams import Messages, content, resumption

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4}


def request(sampling: dict[str, Any], stopping: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    if "chat" not in fields:
        fields["text"] = "Once upon a time"
    return pb.GenerateRequest(
        resumable=True, sampling=sampling, stopping={"max_tokens": 12} | (stopping or {}), **fields
    )


REQUESTS = {
    "greedy": request({"temperature": 0}),
    "seeded": request({"seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    "samples": request({"seed": 8, "n": 3, "temperature": 1.5}),
    "penalties": request({"seed": 9, **PENALTIES, "n": 2}, {"max_tokens": 24}),
    "greedy with penalties": request({"temperature": 0, **PENALTIES}, {"max_tokens": 24}),
    "bias": request({"seed": 10, "logit_bias": {5: 3.0, 300: -100.0}}),
    "allowed": request({"seed": 11, "allowed_token_ids": list(range(60, 120))}),
    "min_tokens": request({"temperature": 0, "logit_bias": {2: 100.0}}, {"min_tokens": 6}),
    "stop ids": request({"seed": 12}, {"stop_token_ids": list(range(260, 320)), "min_tokens": 3}),
    "stop strings": request({"temperature": 0}, {"stop": ["named", " little x", "a\x00"], "max_tokens": 30}),
    "log-probabilities": request({"seed": 13, "n": 2}, output={"logprobs": 3, "prompt_logprobs": 2}),
    "chat": request({"seed": 14}, chat={"messages": [{"role": "user", "content": "Tell a story about a fox."}]}),
    "beams": request({"beam_width": 3, "n": 2}, {"max_tokens": 8}),
}


async def run(stub: Any, whole: pb.GenerateRequest) -> Messages:
    return [message async for message in stub.Generate(whole)]


@pytest.mark.parametrize("name", REQUESTS)
async def test_streams_of_the_model_continue_after_every_message(stack: Stack, name: str) -> None:
    whole = REQUESTS[name]
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = GenerationStub(channel)
        messages = await run(stub, whole)
        expected = content(messages)
        places = range(1, len(messages) + 1)
        rests = await asyncio.gather(*(run(stub, resumption(whole, messages[:place])) for place in places))
        for place, rest in zip(places, rests, strict=True):
            assert content([*messages[:place], *rest]) == expected, f"cut after message {place} of {len(messages)}"
