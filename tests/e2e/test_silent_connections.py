"""Connections that send nothing do not keep others out, although the scheduler has few descriptors."""

import asyncio
from contextlib import ExitStack
from socket import create_connection

from tests.support.e2e.stack import QUIRE, Stack

NUM_SILENT = 260
FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", *QUIRE)


def connect(stack: ExitStack, address: str) -> None:
    host, port = address.rsplit(":", 1)
    for _ in range(NUM_SILENT):
        stack.enter_context(create_connection((host, int(port)), timeout=30))


async def test_health_and_requests_are_answered_beside_silent_connections() -> None:
    async with Stack(apart=True, scheduler=FEW_DESCRIPTORS) as services, services.client() as before:
        assert (await before.complete("A fox", max_tokens=3)).text
        with ExitStack() as silent:
            await asyncio.to_thread(connect, silent, services.http)
            await asyncio.to_thread(connect, silent, services.grpc)
            assert await services.get("/healthz") == (200, "ok\n")
            assert await services.readyz() == 200
            assert (await before.complete("A fox", max_tokens=3)).text, "a client that is connected is served at once"
            async with services.client() as new:  # and a new one when the silent connections are closed
                assert (await new.complete("A fox", max_tokens=3, wait_for_ready=True)).text
            assert await services.get("/healthz") == (200, "ok\n")
            _, page = await services.get("/metrics")
        counted = next(line for line in page.splitlines() if 'limit="silent_connections"' in line)
        assert float(counted.split()[-1]) > 0
