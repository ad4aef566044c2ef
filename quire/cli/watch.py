"""Detects a child that hangs. Such a child does not end, so the supervisor alone would not restart it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.channel import CHANNEL_OPTIONS
from quire.cli.supervisor import Supervisor

_NUM_CHECKS = 4
"""Number of consecutive checks that must fail, spread over timeout_s.

Failures are counted, and time is not measured, so that no child is killed because this process or the machine was
suspended.
"""


async def replace_when_hung(
    supervisor: Supervisor, name: str, is_serving: Callable[[float], Awaitable[bool]], timeout_s: float
) -> None:
    """Kills a child that was ready and has not served for timeout_s; the supervisor restarts it. Never returns.

    A child that has not been ready yet is left alone, because it may be loading a model.

    is_serving  called with the maximum time for the answer, in seconds
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
    """Yields a function that asks grpc.health.v1 at an address. It returns False if no answer comes in time."""
    async with grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def is_serving(timeout_s: float) -> bool:
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError:
                return False
            return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

        yield is_serving
