"""Both clients and a server that is absent, late or slow."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

import quire
from quire.addresses import with_port
from quire.channel import CHANNEL_OPTIONS
from quire.v1.generation_pb2 import GenerateResponse
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


@pytest.fixture
def network(server: ScriptedServer) -> Iterator[Proxy]:
    proxy = Proxy(server.address)
    proxy.start()
    yield proxy
    proxy.close()


@KINDS
def test_a_stream_of_a_server_that_falls_silent_ends_as_unavailable(
    server: ScriptedServer, network: Proxy, kind: type[SyncCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open, and nothing arrives any more: the server is stopped, or its machine is gone."""
    shorter = {"grpc.keepalive_time_ms": 200, "grpc.keepalive_timeout_ms": 200, "grpc.http2.ping_timeout_ms": 200}
    options = tuple((name, shorter.get(name, value)) for name, value in CHANNEL_OPTIONS)
    assert {name for name, _ in options} >= shorter.keys()
    for module in (quire.channel, quire.client, quire.async_client):
        monkeypatch.setattr(module, "CHANNEL_OPTIONS", options, raising=False)

    async def silenced(request: object, context: object) -> AsyncIterator[GenerateResponse]:
        yield started()
        network.stall()
        await asyncio.Event().wait()

    server.script = silenced
    with pytest.raises(quire.UnavailableError):
        kind(network.address).events("p")


def test_clients_send_no_more_pings_than_a_server_permits() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(grpc_server.OPTIONS)
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1
