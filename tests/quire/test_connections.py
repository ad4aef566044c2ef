"""Both clients and a server that is absent, late or slow."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

import quire
from gateway.config import GatewayConfig
from quire.addresses import with_port
from quire.channel import CHANNEL_OPTIONS, Connection
from quire.v1.generation_pb2 import GenerateRequest, GenerateResponse
from scheduler.servers import grpc_server
from tests.support.client.calls import KINDS, SyncCalls
from tests.support.client.scripted_server import ScriptedServer, delta, finished, replies, started
from tests.support.e2e.proxy import Proxy


@KINDS
def test_an_address_without_a_server_is_unavailable(kind: type[SyncCalls]) -> None:
    address = with_port("127.0.0.1:0")
    for method, arguments in (("complete", ("p",)), ("server_info", ())):
        with pytest.raises(quire.UnavailableError):
            kind(address).call(method, *arguments)


@KINDS
def test_a_proxy_of_the_environment_is_not_asked_for_a_server_on_this_machine(
    server: ScriptedServer, kind: type[SyncCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{with_port('127.0.0.1:0')}")
    assert kind(server.address).call("complete", "p")


@pytest.mark.parametrize("is_direct", [False, True])
def test_only_clients_reach_other_machines_through_a_proxy_of_the_environment(
    is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway would send its key, and the prompts of all callers, through a proxy that is for other networks."""
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    elsewhere = "192.0.2.1:50051"  # an address that no machine has
    client = Connection(elsewhere, "key", False, None, None)
    gateway = GatewayConfig.from_dict({"scheduler": elsewhere}).connections("key")[0]
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(1.0 if is_direct else 30.0)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with (gateway if is_direct else client).channel(grpc) as channel:
            ready = grpc.channel_ready_future(channel)
            if is_direct:
                with pytest.raises(TimeoutError):
                    proxy.accept()
            else:
                with proxy.accept()[0] as connection:
                    assert connection.recv(100).startswith(f"CONNECT {elsewhere} ".encode())
            ready.cancel()


@KINDS
@pytest.mark.parametrize("timeout_s", [1e10, float("inf")])
def test_a_deadline_that_is_too_far_away_for_grpc_is_none(
    server: ScriptedServer, kind: type[SyncCalls], timeout_s: float
) -> None:
    """A deadline in 64-bit nanoseconds, with which gRPC computes, would be in the past."""
    assert kind(server.address, timeout_s=timeout_s).call("complete", "p")
    assert kind(server.address).call("complete", "p", timeout_s=timeout_s)


@KINDS
def test_a_deadline_that_is_no_number_is_refused(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        kind(server.address, timeout_s=float("nan")).call("complete", "p")
    with pytest.raises(ValueError, match="timeout_s"):
        kind(server.address).call("complete", "p", timeout_s=float("nan"))


@KINDS
def test_wait_for_ready_waits_for_a_server_that_starts_later(kind: type[SyncCalls]) -> None:
    address = with_port("127.0.0.1:0")
    server = ScriptedServer()
    starter = threading.Timer(0.2, server.start, (address,))
    starter.start()
    try:
        assert kind(address, wait_for_ready=True).events("p", timeout_s=20)[0] == quire.Started("r", 3, 0)
    finally:
        starter.join()
        server.stop()


@KINDS
def test_waiting_for_a_server_ends_with_the_deadline(kind: type[SyncCalls]) -> None:
    address = with_port("127.0.0.1:0")
    with pytest.raises(quire.DeadlineExceededError):
        kind(address, wait_for_ready=True).events("p", timeout_s=0.3)
    with pytest.raises(quire.UnavailableError):
        kind(address, wait_for_ready=True).events("p", timeout_s=20, wait_for_ready=False)


@pytest.fixture
def slow_server(server: ScriptedServer) -> Iterator[str]:
    """Yields an address that passes no data for a second, as on a busy machine, and then relays to the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets = [listener]

    def relay(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                time.sleep(1.0)
                behind = socket.create_connection(split(server.address))
                open_sockets.extend((client, behind))
                for ends in ((client, behind), (behind, client)):
                    threading.Thread(target=relay, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    for each in open_sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@KINDS
def test_clients_wait_for_a_server_that_accepts_slowly(
    server: ScriptedServer, slow_server: str, kind: type[SyncCalls]
) -> None:
    server.script = replies(started("r"), delta(0, "a", 1), finished(0))
    assert len(kind(slow_server).events("hello")) == 3


@KINDS
def test_a_stream_of_a_server_that_falls_silent_ends_as_unavailable(
    server: ScriptedServer, network: Proxy, kind: type[SyncCalls], set_keepalive: Callable[[int], None]
) -> None:
    """The connection stays open, and nothing arrives any more: the server is stopped, or its machine is gone."""
    set_keepalive(200)

    async def silenced(request: object, context: object) -> AsyncIterator[GenerateResponse]:
        yield started()
        network.stall()
        await asyncio.Event().wait()

    server.script = silenced
    with pytest.raises(quire.UnavailableError):
        kind(network.address, resume_timeout_s=0).events("p")


def test_clients_send_no_more_pings_than_a_server_permits() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(grpc_server.OPTIONS)
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("permitted_ms", "is_permitted"), [(500, True), (10_000, False)])
async def test_pings_in_a_quiet_stream(
    set_keepalive: Callable[[int], None], permitted_ms: int, is_permitted: bool
) -> None:
    """The intervals have the ratio of the real ones. The third ping that comes too early would end the connection."""
    set_keepalive(1000)  # gRPC sends no more than one in a second
    server = ScriptedServer((("grpc.http2.min_ping_interval_without_data_ms", permitted_ms),))

    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        yield started()
        yield delta(0, "a", 1)
        await asyncio.sleep(6)
        yield finished(0)

    server.script = script
    server.start()
    try:
        async with quire.AsyncClient(server.address) as client:
            if is_permitted:
                assert (await client.complete("p")).text == "a"
            else:
                with pytest.raises(quire.UnavailableError, match="Too many pings"):
                    await client.complete("p")
    finally:
        server.stop()
