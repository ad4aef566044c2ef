"""An attack with messages that are as large as gRPC accepts, and that the server refuses when it has read them."""

import asyncio
import contextlib

import grpc.aio

from quire.channel import CallDefaults, Connection
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub

_NUM_CALLS = 50
_NUM_BYTES = 4_000_000
_PAUSE_S = 0.01


async def send_large_messages(address: str, api_key: str | None) -> None:
    """Makes 50 calls at once on a connection of its own, again and again. A tenth end while their message is sent."""
    request = pb.GenerateRequest(text="a" * _NUM_BYTES)
    channel = Connection(address, api_key, tls=False, ca=None, admin=None).channel(grpc.aio)

    async def call(timeout_s: float) -> None:
        arguments = CallDefaults(timeout_s, wait_for_ready=True, api_key=api_key).arguments(None)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in GenerationStub(channel).Generate(request, **arguments):
                    pass
            await asyncio.sleep(_PAUSE_S)

    async with channel, asyncio.TaskGroup() as group:
        for i in range(_NUM_CALLS):
            group.create_task(call(30.0 if i % 10 else 0.02))
