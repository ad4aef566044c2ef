"""Detects a child that hangs. Such a child does not end, so the supervisor alone would not restart it."""

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.addresses import HostPort
from quire.channel import CHANNEL_OPTIONS
from quire.cli.supervisor import Supervisor

Probe: TypeAlias = Callable[[float], Awaitable[bool]]
"""Says whether a child serves, or is alive. Called with the maximum time for the answer, in seconds."""

PROBE_TIMEOUT_S = 5.0

_NUM_CHECKS = 4
"""Number of consecutive checks that must fail, spread over timeout_s.

Failures are counted, and time is not measured, so that no child is killed because this process or the machine was
suspended.
"""


async def replace_when_hung(
    supervisor: Supervisor,
    name: str,
    is_serving: Probe,
    timeout_s: float,
    load_timeout_s: float,
) -> NoReturn:
    """Kills a child that has served, and then has not for timeout_s; the supervisor restarts it. Never returns.

    A process that has neither said `ready` nor passed a check may be loading a model. It is killed if it prints no line
    for load_timeout_s.
    """
    loop, interval_s = asyncio.get_running_loop(), timeout_s / _NUM_CHECKS
    num_load_checks = max(_NUM_CHECKS, math.ceil(load_timeout_s / interval_s))
    num_failed, served = 0, None
    seen: object = None
    while True:
        pid, asked_s = supervisor.pid(name), loop.time()
        has_served = supervisor.has_said_ready(name) or (pid is not None and pid == served)
        last, seen = seen, (pid, has_served, has_served or supervisor.num_lines(name))
        if pid is None or seen != last:
            num_failed = 0
        if await is_serving(interval_s):
            num_failed, served = 0, pid
        else:
            num_failed += 1
        if pid is not None and num_failed >= (_NUM_CHECKS if has_served else num_load_checks):
            problem = f"served for {timeout_s:g} s" if has_served else f"printed a line for {load_timeout_s:g} s"
            await supervisor.end_hung(name, f"has not {problem}")
            num_failed = 0  # the system may take a while to end a killed process
        await asyncio.sleep(max(0.0, asked_s + interval_s - loop.time()))


def liveness_probe(http_address: str) -> Probe:
    """Returns a function that asks GET /healthz at an address. It returns False if no 200 comes in time.

    A separate thread of the scheduler answers, in clear text even under TLS, as long as the event loop runs.
    """
    target = HostPort.parse(http_address)

    async def ask() -> bool:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(f"GET /healthz HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n".encode())
            line = await reader.readline()
            return not line or b" 200 " in line  # a server that closes connections beyond its limit is alive
        finally:
            writer.close()

    return _in_time(ask)


def handshake_probe(address: str) -> Probe:
    """Returns a function that begins TLS at an address. It returns False if the handshake does not end in time.

    The server's event loop takes part in the handshake. A request could follow only with a certificate, where clients
    need one: the server asks for it in TLS 1.3, where the handshake has ended for the client before it is refused.
    """
    target = HostPort.parse(address)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    async def ask() -> bool:
        _, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
        writer.transport.abort()
        return True

    return _in_time(ask)


def _in_time(ask: Callable[[], Awaitable[bool]]) -> Probe:
    async def is_alive(timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await ask()
        except (OSError, TimeoutError, ValueError):  # ValueError: a line without an end
            return False

    return is_alive


@asynccontextmanager
async def health_probe(address: str) -> AsyncIterator[Probe]:
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
