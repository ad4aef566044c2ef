"""The rest of a body that is not needed is read slowly: its client sees the answer, and the server goes on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.http import unread_bodies
from quire.http.unread_bodies import UnreadBodies
from tests.support.waiting import until

NUM_BYTES = 64 << 20

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    unread = UnreadBodies()

    @web.middleware
    async def discard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        await unread.discard(request, response)
        return response

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=413, text="too large\n")

    app = web.Application(middlewares=[discard])
    app.add_routes([web.post("/", refuse)])
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(shutdown_timeout=0.1)  # it does not wait for the bodies that it reads slowly
    assert server.port is not None
    yield server.port
    await server.close()


async def send_large_body(port: int) -> Connection:
    """Sends a request with a large body as fast as the server reads it. Returns when the answer's header is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {NUM_BYTES}\r\n\r\n".encode())
    writer.write(b"a" * NUM_BYTES)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"Connection: close" in head
    return reader, writer


def limit(patch: pytest.MonkeyPatch, discard_s: float, pause_s: float, pieces_per_s: float) -> None:
    patch.setattr(unread_bodies, "DISCARD_S", discard_s)
    patch.setattr(unread_bodies, "PAUSE_S", pause_s)
    patch.setattr(unread_bodies, "PIECES_PER_S", pieces_per_s)


async def test_a_client_that_sends_its_whole_body_gets_the_whole_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 3600.0, 0.0, 1e9)
    reader, writer = await send_large_body(port)
    await writer.drain()
    assert await reader.read() == b"too large\n", "and the connection is closed"
    writer.close()


@pytest.mark.parametrize(("pause_s", "pieces_per_s"), [(3600.0, 1e9), (0.0, 1 / 3600)])
async def test_bodies_are_read_slowly(
    port: int, monkeypatch: pytest.MonkeyPatch, pause_s: float, pieces_per_s: float
) -> None:
    limit(monkeypatch, 30.0, pause_s, pieces_per_s)
    connections = [await send_large_body(port) for _ in range(3)]
    for _ in range(200):
        await asyncio.sleep(0.001)
    for _, writer in connections:
        assert writer.transport.get_write_buffer_size() > NUM_BYTES // 2, "the server has read a part only"
        writer.transport.abort()


async def test_a_body_that_is_not_compressed_as_it_says_is_no_error_of_the_server(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\ngarbage")
    assert (await reader.read()).endswith(b"too large\n"), "and the connection is closed"
    writer.close()
    assert [each for each in caplog.records if each.levelname not in ("DEBUG", "INFO")] == []


async def test_a_body_without_an_end_ends_the_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 0.01, 3600.0, 1e9)
    _, writer = await send_large_body(port)
    await until(writer.transport.is_closing)
    writer.transport.abort()
