"""Metrics and readiness over HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from quire.addresses import AddressInUse
from scheduler.engine.engine import Engine, ServerState
from scheduler.servers.http_server import HttpServer
from scheduler.telemetry.metrics import SchedulerMetrics
from tests.support.scheduler.fake_engine import FakeEngine


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(engine: FakeEngine) -> AsyncIterator[HttpServer]:
    metrics = SchedulerMetrics()
    metrics.engine = cast("Engine", engine)
    server = HttpServer(metrics.engine, metrics)
    await server.start("127.0.0.1:0")
    yield server
    await server.stop()


async def get(server: HttpServer, path: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{server.address}{path}") as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_metrics(server: HttpServer) -> None:
    status, content_type, text = await get(server, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    assert 'quire_kv_blocks{model_name="tiny",state="cached"} 1.0' in text


@pytest.mark.parametrize("state", ServerState)
async def test_readiness_gives_its_reason(server: HttpServer, engine: FakeEngine, state: ServerState) -> None:
    engine.become(state)
    status, _, text = await get(server, "/readyz")
    assert (status, text) == (200 if state is ServerState.SERVING else 503, f"{state.value}\n")
    assert (await get(server, "/healthz"))[0] == 200


async def test_readiness_says_what_somebody_has_to_act_upon(server: HttpServer, engine: FakeEngine) -> None:
    engine.become(ServerState.WAITING_FOR_EXECUTOR)
    engine.trouble = "the executor has another model"
    status, _, text = await get(server, "/readyz")
    assert (status, text) == (503, "waiting for executor: the executor has another model\n")


def ask(server: HttpServer, *pieces: bytes) -> bytes:
    """Blocks whoever calls it until the answer is complete: the event loop, for one."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    return answer


PROBE = b"GET /healthz HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n"


async def test_liveness_waits_for_no_turn_of_the_event_loop(server: HttpServer) -> None:
    for _ in range(3):
        answer = ask(server, PROBE)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\nok\n")


async def test_a_loop_that_has_stopped_is_told(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.sleep(0)
    monkeypatch.setattr("scheduler.servers.health.STUCK_AFTER_S", 0.0)
    assert b" 503 Service Unavailable\r\n" in ask(server, PROBE)
    assert ask(server, PROBE).endswith(b"stuck: the event loop has not turned for 0 s\n")
    monkeypatch.undo()
    assert ask(server, PROBE).endswith(b"\r\n\r\nok\n")


async def test_a_probe_in_pieces_is_answered_too(server: HttpServer) -> None:
    def in_pieces() -> bytes:
        return ask(server, PROBE[:7], PROBE[7:30], PROBE[30:])

    answers = [await asyncio.to_thread(in_pieces) for _ in range(5)]
    assert all(answer.endswith(b"\r\n\r\nok\n") for answer in answers)


async def test_those_who_say_nothing_keep_nobody_out(server: HttpServer) -> None:
    host, port = server.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(300)]
    for connection in silent[::2]:
        connection.close()
    assert (await get(server, "/readyz"))[0] == 200
    assert ask(server, PROBE).endswith(b"ok\n")
    silent[1].sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
    assert (await asyncio.to_thread(silent[1].recv, 4096)).startswith(b"HTTP/1.0 200 OK")
    for connection in silent:
        connection.close()


@pytest.mark.parametrize(
    ("host", "allowed", "is_allowed"),
    [
        ("127.0.0.1:8080", (), True),
        ("192.168.3.4", (), True),
        ("[::1]:8080", (), True),
        ("localhost:8080", (), True),
        ("LOCALHOST.", (), True),
        ("quire.localhost", (), True),
        ("evil.example", (), False),
        ("evil.example:8080", ("good.example",), False),
        ("localhost.evil.example", (), False),
        ("127.0.0.1.evil.example", (), False),
        ("good.example:443", ("other.example", "Good.example"), True),
        ("any.example", ("*",), True),
        ("", (), False),
    ],
)
async def test_names_that_a_page_may_be_asked_for_by(
    host: str, allowed: tuple[str, ...], is_allowed: bool, engine: FakeEngine
) -> None:
    """Under another name it might be a page of another site that asks (DNS rebinding); machines may use any."""
    server = HttpServer(cast("Engine", engine), SchedulerMetrics(), allowed_hosts=allowed)
    await server.start("127.0.0.1:0")
    statuses = {path: await get_as(server, host, path) for path in ("/", "/live/events", "/metrics", "/readyz")}
    await server.stop()
    page = 404 if is_allowed else 421
    assert statuses == {"/": page, "/live/events": page, "/metrics": 200, "/readyz": 200}


async def get_as(server: HttpServer, host: str, path: str) -> int:
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    return int((await asyncio.to_thread(ask, server, request)).split()[1])


class SlowPage:
    """In the place of the live page: an answer that waits for `go_on`, as a completion waits for tokens."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    def add_to(self, app: web.Application) -> None:
        app.add_routes([web.get("/slow", self._show)])

    async def _show(self, request: web.Request) -> web.Response:
        self.entered.set()
        await self.go_on.wait()
        return web.Response(text="all of it")


@asynccontextmanager
async def in_the_middle(engine: FakeEngine) -> AsyncIterator[tuple[HttpServer, SlowPage, asyncio.Task[Any]]]:
    """A server that is answering somebody, who waits."""
    page = SlowPage()
    server = HttpServer(cast("Engine", engine), SchedulerMetrics(), cast("Any", page))
    await server.start("127.0.0.1:0")
    asking = asyncio.create_task(get(server, "/slow"))
    await page.entered.wait()
    yield server, page, asking
    await server.stop()
    await asyncio.wait({asking})


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_who_has_not_ended_after_the_grace_is_cancelled(engine: FakeEngine, grace_s: float) -> None:
    async with in_the_middle(engine) as (server, _, asking):
        async with asyncio.timeout(20):
            await server.stop(grace_s)
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_who_ends_within_the_grace_gets_all_of_it(engine: FakeEngine) -> None:
    async with in_the_middle(engine) as (server, page, asking):
        stopping = asyncio.create_task(server.stop(600))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        page.go_on.set()
        async with asyncio.timeout(20):
            await stopping
        assert (await asking)[2] == "all of it"


async def test_nothing_else(server: HttpServer) -> None:
    assert (await get(server, "/"))[0] == 404
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{server.address}/metrics") as response,
    ):
        assert response.status == 405


async def test_an_address_in_use(engine: FakeEngine) -> None:
    server = HttpServer(cast("Engine", engine), SchedulerMetrics())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(AddressInUse):
            await server.start(f"127.0.0.1:{taken.getsockname()[1]}")
    await server.stop()
