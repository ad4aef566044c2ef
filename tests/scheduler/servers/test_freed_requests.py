"""Requests are freed when their calls are refused or cancelled, without a collection of garbage."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.servers.grpc_server import GENERATE
from scheduler.servers.read_requests import ReadRequests
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler.servers.request_places import RequestPlaces
    from tests.support.scheduler.servers import Servers

BIG = 4 * 2**20 - 64


@pytest.fixture
def _no_collections() -> Iterator[None]:
    """Full collections are rare in a server."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("method", ["generate", "tokenize", "check"])
async def test_refused_requests_are_freed_at_once(method: str, servers: Servers) -> None:
    """No cycle of an error and its frames holds them until the next full collection."""
    served = await servers.start()
    path = {
        "generate": GENERATE,
        "tokenize": "/quire.v1.Tokenization/Tokenize",
        "check": "/grpc.health.v1.Health/Check",
    }[method]
    data = pb.GenerateRequest(text="a" * BIG).SerializeToString()

    async def refused() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(aiter(served.channel.unary_stream(path)(data, timeout=30)))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    for _ in range(5):
        await refused()
    before = _resident_bytes()
    for _ in range(50):
        await refused()
    assert _resident_bytes() - before < 20 * BIG


@pytest.mark.usefixtures("_no_collections")
async def test_calls_that_linger_hold_no_requests(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was cancelled at once keeps its stream, and not the request that has arrived meanwhile."""
    monkeypatch.setattr("scheduler.servers.reset_calls.BURST", 0)
    monkeypatch.setattr("scheduler.servers.reset_calls.RATE_PER_S", 1e-3)
    served = await servers.start()
    serve = ReadRequests._serve_one
    num_held = 0

    async def hold(self: Any, places: RequestPlaces, handler: Any, peer: str, context: Any) -> None:
        async def wait(request: object, _: object) -> None:
            nonlocal num_held
            num_held += 1
            await asyncio.Event().wait()
            del request

        await serve(self, places, handler._replace(unary_stream=wait, response_streaming=True), peer, context)

    monkeypatch.setattr(ReadRequests, "_serve_one", hold)
    data = pb.GenerateRequest(text="a" * BIG).SerializeToString()

    async def cancelled_at_once() -> None:
        num_before = num_held
        call = served.channel.unary_stream(GENERATE)(data, timeout=60)
        await until(lambda: num_held > num_before)
        call.cancel()

    for _ in range(5):
        await cancelled_at_once()
    before = _resident_bytes()
    for _ in range(50):
        await cancelled_at_once()
    await until(lambda: _resident_bytes() - before < 20 * BIG)
