"""An attack with requests that continue a stream, each with the longest output that a stream can have received."""

import asyncio
import contextlib
import random
from typing import Any

import grpc.aio

from quire.channel import CallDefaults, Connection
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub

_NUM_SEQUENCES = 16
_NUM_TOKENS = 2000
_STOP_STRINGS = [" a" * 127 + end for end in "abcdefghijklmnop"]
_PAUSE_S = 0.01


async def resume_again_and_again(address: str, api_key: str | None, seed: int) -> None:
    """Begins a stream, and continues it in a loop. The server brings the text of each to where the stream broke off.

    The stop strings nearly occur in the text, so that the server looks for them in all of it.
    """
    rng = random.Random(seed)
    channel = Connection(address, api_key, tls=False, ca=None, admin=None).channel(grpc.aio)
    arguments = CallDefaults(30.0, wait_for_ready=True, api_key=api_key).arguments(None)
    request = pb.GenerateRequest(
        resumable=True,
        token_ids=pb.TokenIds(ids=[7, 8, 9]),
        sampling=pb.SamplingParams(temperature=1.0, n=_NUM_SEQUENCES),
        stopping=pb.StoppingParams(max_tokens=_NUM_TOKENS + 8, ignore_eos=True, stop=_STOP_STRINGS),
    )
    async with channel:
        stub: Any = GenerationStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if not request.HasField("resume"):
                    first = await _first_message(stub, request, arguments)
                    request.resume.continuation.CopyFrom(first.started.continuation)
                del request.resume.sequences[:]
                for index in range(_NUM_SEQUENCES):
                    token_ids = [rng.randrange(10, 250) for _ in range(_NUM_TOKENS)]
                    request.resume.sequences.add(index=index, token_ids=token_ids)
                await _first_message(stub, request, arguments)
            await asyncio.sleep(_PAUSE_S)


async def _first_message(stub: Any, request: pb.GenerateRequest, arguments: dict[str, Any]) -> Any:
    """Sends a request, and cancels it as soon as its stream has begun."""
    call = stub.Generate(request, **arguments)
    try:
        return await call.read()
    finally:
        call.cancel()
