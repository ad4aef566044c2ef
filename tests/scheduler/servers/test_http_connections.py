"""Connections to the scheduler's HTTP port that send what is no HTTP, no further request, or read nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from quire.http import runner
from scheduler.servers.http_server import HttpServer
from scheduler.telemetry.limits import NUM_LIMITED, STALLED_READERS
from scheduler.telemetry.metrics import SchedulerMetrics
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.waiting import until

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine


def made(**options: Any) -> HttpServer:
    metrics = SchedulerMetrics()
    metrics.engine = cast("Engine", FakeEngine())
    return HttpServer(metrics.engine, metrics, **options)


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = made()
    await server.start("127.0.0.1:0")
    yield server
    await server.stop()


async def exchanged(server: HttpServer, *heads: bytes) -> bytes:
    """Returns what a connection receives until its end, after each of its requests has been answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.split(":")[1]))
    received = b""
    for head in heads:
        writer.write(head)
        received += await asyncio.wait_for(reader.readline(), 20)
    received += await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return received


@pytest.mark.parametrize(
    "head",
    [
        b"GET /readyz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer qk_secret\x01\r\n\r\n",
        b"GET /readyz HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer qk_secret\r\n\r\n",
        b"POST /readyz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nqk_secret\r\n",
    ],
)
async def test_requests_that_are_not_http_leave_nothing_in_the_log(
    server: HttpServer, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers decide how often they come, and aiohttp would quote their bytes."""
    caplog.set_level("DEBUG")
    assert b" 4" in await exchanged(server, head)
    assert "secret" not in caplog.text
    assert [each for each in caplog.records if each.name == "aiohttp.server" and each.levelname == "ERROR"] == []


async def test_a_body_behind_an_unknown_expectation_is_not_read(server: HttpServer) -> None:
    head = b"POST /readyz HTTP/1.1\r\nHost: x\r\nExpect: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.split(":")[1]))
    writer.write(head)
    assert b" 417 " in await asyncio.wait_for(reader.readline(), 20)
    num_pieces = 0
    with suppress(ConnectionError):
        while num_pieces < 2000:  # 125 MiB
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            num_pieces += 1
    assert num_pieces < 1000


async def test_a_connection_without_a_further_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "KEEPALIVE_S", 0.2)
    server = made()
    await server.start("127.0.0.1:0")
    assert b" 200 " in await exchanged(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await exchanged(server, b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    await server.stop()


async def test_a_client_that_reads_nothing_loses_its_connection() -> None:
    server = made(stalled_reader_timeout_s=0.4)
    await server.start("127.0.0.1:0")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(server.address.split(":")[1])))
    client.setblocking(False)
    before = NUM_LIMITED[STALLED_READERS]

    def is_dropped() -> bool:
        with suppress(BlockingIOError, ConnectionError):  # requests whose answers are not read
            client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return NUM_LIMITED[STALLED_READERS] > before

    await until(is_dropped, what="the connection is dropped")
    assert b" 200 " in await exchanged(server, b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    client.close()
    await server.stop()
