"""Metrics and readiness over HTTP."""

import socket
from collections.abc import AsyncIterator
from typing import cast

import aiohttp
import pytest

from scheduler.engine import Engine, ServerState
from scheduler.grpc_server import AddressInUse
from scheduler.http_server import HttpServer
from scheduler.metrics import SchedulerMetrics

from .fake_engine import FakeEngine


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
