"""Finds out that a child runs and does nothing: whoever stands still does not end, and is not restarted by itself."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.channel import CHANNEL_OPTIONS
from quire.cli.supervisor import Supervisor

_NUM_CHECKS = 4
"""So many in a row must fail, in timeout_s together. Counted, not read off a clock: nobody was late while this process,
or the whole machine, stood still."""


async def replace_when_hung(
    supervisor: Supervisor, name: str, is_serving: Callable[[float], Awaitable[bool]], timeout_s: float
) -> None:
    """Kills a child, for the supervisor to restart, that was ready and for timeout_s has not served. Never returns.

    One that has yet to say that it is ready is left alone: it may load a model.

    is_serving  given the seconds in which there must be an answer
    """
    loop, interval_s = asyncio.get_running_loop(), timeout_s / _NUM_CHECKS
    num_failed = 0
    while True:
        was_ready, asked_s = supervisor.has_said_ready(name), loop.time()
        serves = await is_serving(interval_s)
        num_failed = 0 if serves or not was_ready else num_failed + 1
        if num_failed == _NUM_CHECKS:
            supervisor.kill_hung(name, timeout_s)
        await asyncio.sleep(max(0.0, asked_s + interval_s - loop.time()))


@asynccontextmanager
async def health_probe(address: str) -> AsyncIterator[Callable[[float], Awaitable[bool]]]:
    """What grpc.health.v1 says at an address; False as well where nobody answers in time."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def is_serving(timeout_s: float) -> bool:
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError:
                return False
            return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

        yield is_serving
