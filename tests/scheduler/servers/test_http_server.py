"""Metrics, liveness and readiness over HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from quire.addresses import AddressInUse
from quire.http import unread_bodies
from scheduler.engine.engine import Engine, ServerState
from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import add_key
from scheduler.identity.verifier import Verifier
from scheduler.servers.access import Access
from scheduler.servers.health import MAX_SILENT
from scheduler.servers.http_server import HttpServer
from scheduler.servers.refusals import Refusals
from scheduler.telemetry.limits import OPEN_CONNECTIONS, SILENT_CONNECTIONS
from scheduler.telemetry.metrics import SchedulerMetrics
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.limits import counted


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


async def get(server: HttpServer, path: str, headers: dict[str, str] | None = None) -> tuple[int, str, str]:
    url = f"http://{server.address}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_metrics_are_served(server: HttpServer) -> None:
    status, content_type, text = await get(server, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    assert 'quire_kv_blocks{model_name="tiny",state="cached"} 1.0' in text


@pytest.mark.parametrize("secret", [b"qk_\xff", b"a.b.\xff", b"\xc3\xa9"])
async def test_a_key_that_is_not_ascii_is_refused_like_any_other(
    engine: FakeEngine, tmp_path: Path, secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each such request would leave a traceback in the log."""
    path = str(tmp_path / "keys.json")
    add_key(path, Identity("a", "a", frozenset({Role.OBSERVE})))
    refused: list[str] = []
    metrics = SchedulerMetrics()
    metrics.engine = cast("Engine", engine)
    server = HttpServer(metrics.engine, metrics, access=Access(Verifier(path), Refusals(refused.append)))
    await server.start("127.0.0.1:0")
    try:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret + b"\r\n\r\n")
        status = await reader.readuntil(b"\r\n")
        writer.close()
    finally:
        await server.stop()
    assert status.startswith(b"HTTP/1.1 401 ")
    assert len(refused) == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("state", ServerState)
async def test_readiness_names_the_engine_state(server: HttpServer, engine: FakeEngine, state: ServerState) -> None:
    engine.become(state)
    status, _, text = await get(server, "/readyz")
    assert (status, text) == (200 if state is ServerState.SERVING else 503, f"{state.value}\n")
    assert (await get(server, "/healthz"))[0] == 200


async def test_readiness_names_a_problem_that_needs_action(server: HttpServer, engine: FakeEngine) -> None:
    engine.become(ServerState.WAITING_FOR_EXECUTOR)
    engine.trouble = "the executor has another model"
    status, _, text = await get(server, "/readyz")
    assert (status, text) == (503, "waiting for executor: the executor has another model\n")


async def test_readiness_names_the_problem_to_observers_only(engine: FakeEngine, tmp_path: Path) -> None:
    callers = Callers(tmp_path)
    engine.become(ServerState.WAITING_FOR_EXECUTOR)
    engine.trouble = "the executor serves another scheduler, process 7 of host-7"
    server = HttpServer(cast("Engine", engine), SchedulerMetrics(), access=callers.access())
    await server.start("127.0.0.1:0")
    found = {caller: await get(server, "/readyz", callers.header(caller)) for caller in callers.keys}
    await server.stop()
    assert {status for status, _, _ in found.values()} == {503}
    assert {caller for caller, (_, _, text) in found.items() if "host-7" in text} == {"observe", "admin"}
    assert found["none"][2] == "waiting for executor\n"
    assert callers.counted == [], "no caller is refused"


def send(server: HttpServer, *pieces: bytes) -> bytes:
    """Sends a request and blocks until the answer is complete; in a coroutine it blocks the event loop."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    return answer


PROBE = b"GET /healthz HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n"


async def test_liveness_does_not_need_the_event_loop(server: HttpServer) -> None:
    for _ in range(3):
        answer = send(server, PROBE)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\nok\n")


async def test_stuck_event_loop_is_reported(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.sleep(0)
    monkeypatch.setattr("scheduler.servers.health.STUCK_AFTER_S", 0.0)
    assert b" 503 Service Unavailable\r\n" in send(server, PROBE)
    assert send(server, PROBE).endswith(b"stuck: the event loop has not run for 0 s\n")
    monkeypatch.undo()
    assert send(server, PROBE).endswith(b"\r\n\r\nok\n")


async def test_probe_in_pieces_is_answered(server: HttpServer) -> None:
    def in_pieces() -> bytes:
        return send(server, PROBE[:7], PROBE[7:30], PROBE[30:])

    answers = [await asyncio.to_thread(in_pieces) for _ in range(5)]
    assert all(answer.endswith(b"\r\n\r\nok\n") for answer in answers)


async def test_silent_connections_do_not_block_others(server: HttpServer) -> None:
    host, port = server.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(300)]
    for connection in silent[::2]:
        connection.close()
    assert (await get(server, "/readyz"))[0] == 200
    assert send(server, PROBE).endswith(b"ok\n")
    silent[-1].sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
    assert (await asyncio.to_thread(silent[-1].recv, 4096)).startswith(b"HTTP/1.0 200 OK")
    for connection in silent:
        connection.close()


async def test_the_oldest_silent_connection_makes_room_for_another(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.health.MAX_SILENT_S", 600.0)  # so that it is not closed for its age
    host, port = server.address.split(":")
    with counted(SILENT_CONNECTIONS, 3):
        silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(MAX_SILENT + 3)]
        for oldest in silent[:3]:
            assert await asyncio.to_thread(oldest.recv, 1) == b"", "the server has closed it"
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /metrics HTTP/1.1\r\nX-"])
async def test_a_connection_without_a_whole_request_is_closed(
    server: HttpServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.http_server.FIRST_REQUEST_S", 0.2)
    monkeypatch.setattr("scheduler.servers.health.MAX_SILENT_S", 0.2)
    host, port = server.address.split(":")
    with counted(SILENT_CONNECTIONS), socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(sent)
        assert await asyncio.to_thread(connection.recv, 4096) == b""


async def test_a_connection_that_has_sent_a_request_stays_open(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.http_server.FIRST_REQUEST_S", 0.1)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        for _ in range(3):
            connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.to_thread(connection.recv, 4096)).startswith(b"HTTP/1.1 200 OK")
            await asyncio.sleep(0.2)


async def test_connections_beyond_the_descriptors_are_closed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.http_server.max_http_connections", lambda: 2)
    server = HttpServer(engine, SchedulerMetrics())
    await server.start("127.0.0.1:0")
    try:
        host, port = server.address.split(":")
        held = [socket.create_connection((host, int(port)), timeout=30) for _ in range(3)]
        answers = []
        with counted(OPEN_CONNECTIONS):
            for connection in held:
                connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answers.append(await asyncio.to_thread(_receive, connection))
        assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b""]
        assert send(server, PROBE).endswith(b"ok\n"), "liveness needs no connection of the event loop"
        for connection in held:
            connection.close()
    finally:
        await server.stop()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


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
async def test_page_is_served_under_allowed_host_names_only(
    host: str, allowed: tuple[str, ...], is_allowed: bool, engine: FakeEngine
) -> None:
    """Another host name may mean a request by another site (DNS rebinding). Paths for machines accept any name."""
    server = HttpServer(cast("Engine", engine), SchedulerMetrics(), allowed_hosts=allowed)
    await server.start("127.0.0.1:0")
    statuses = {path: await get_as(server, host, path) for path in ("/", "/live/events", "/metrics", "/readyz")}
    await server.stop()
    page = 404 if is_allowed else 421
    assert statuses == {"/": page, "/live/events": page, "/metrics": 200, "/readyz": 200}


@pytest.mark.parametrize(
    ("host", "headers", "has_exemplars"),
    [
        ("scheduler:8080", {}, True),  # Prometheus
        ("localhost:8080", {"Accept-Language": "en"}, True),
        ("evil.example", {"Accept-Language": "en"}, False),
        ("evil.example", {"Accept-Language": ""}, False),
    ],
)
async def test_pages_of_other_sites_get_no_exemplars(
    server: HttpServer, host: str, headers: dict[str, str], has_exemplars: bool
) -> None:
    """They name the requests of other clients."""
    accept = {"Accept": "application/openmetrics-text", "Host": host}
    status, content_type, _ = await get(server, "/metrics", accept | headers)
    assert (status, "openmetrics" in content_type) == (200, has_exemplars)


async def get_as(server: HttpServer, host: str, path: str) -> int:
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    return int((await asyncio.to_thread(send, server, request)).split()[1])


class SlowPage:
    """A page instead of the live page whose answer waits for `go_on`, as a completion waits for tokens."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    def add_to(self, app: web.Application) -> None:
        app.add_routes([web.get("/live/events", self._show)])

    async def _show(self, request: web.Request) -> web.Response:
        self.entered.set()
        await self.go_on.wait()
        return web.Response(text="all of it")


@asynccontextmanager
async def answering_server(engine: FakeEngine) -> AsyncIterator[tuple[HttpServer, SlowPage, asyncio.Task[Any]]]:
    """Starts a server that is answering one request."""
    page = SlowPage()
    server = HttpServer(cast("Engine", engine), SchedulerMetrics(), cast("Any", page))
    await server.start("127.0.0.1:0")
    answer = asyncio.create_task(get(server, "/live/events"))
    await page.entered.wait()
    yield server, page, answer
    await server.stop()
    await asyncio.wait({answer})


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_open_requests_are_cancelled_after_the_grace_period(engine: FakeEngine, grace_s: float) -> None:
    async with answering_server(engine) as (server, _, answer):
        async with asyncio.timeout(20):
            await server.stop(grace_s)
        with pytest.raises(aiohttp.ClientError):
            await answer


async def test_requests_that_end_within_the_grace_period_are_answered(engine: FakeEngine) -> None:
    async with answering_server(engine) as (server, page, answer):
        stopping = asyncio.create_task(server.stop(600))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        page.go_on.set()
        async with asyncio.timeout(20):
            await stopping
        assert (await answer)[2] == "all of it"


async def test_other_paths_and_methods_are_refused(server: HttpServer) -> None:
    assert (await get(server, "/"))[0] == 404
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{server.address}/metrics") as response,
    ):
        assert response.status == 405


async def test_address_in_use_is_refused(engine: FakeEngine) -> None:
    server = HttpServer(cast("Engine", engine), SchedulerMetrics())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(AddressInUse):
            await server.start(f"127.0.0.1:{taken.getsockname()[1]}")
    await server.stop()


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/readyz", "localhost", 200), ("/nothing", "localhost", 404), ("/nothing", "elsewhere.example", 421)],
)
async def test_the_rest_of_a_body_is_read_slowly(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, path: str, host: str, status: int
) -> None:
    """A body that is too large was read to its end, as fast as it came."""
    monkeypatch.setattr(unread_bodies, "PAUSE_S", 3600.0)
    monkeypatch.setattr(unread_bodies, "DISCARD_S", 3600.0)
    num_bytes = 64 << 20
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.split(":")[1]))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {num_bytes}\r\n\r\n".encode())
        writer.write(b"a" * num_bytes)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        for _ in range(200):
            assert (await get(server, "/readyz"))[0] == 200
        assert writer.transport.get_write_buffer_size() > num_bytes // 2, "the server has read a part only"
    finally:
        writer.transport.abort()
