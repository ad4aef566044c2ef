"""Connections to an executor's metrics port are few, and none is silent for long."""

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from executor import metrics_server
from executor.metrics_server import serve_metrics


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 4)
    assert metrics_server._Handler.timeout == metrics_server.CONNECTION_TIMEOUT_S
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)
    registry = CollectorRegistry()
    Gauge("one", "1", registry=registry).set(1)
    server = serve_metrics("127.0.0.1", 0, registry)
    yield server.server_port
    server.shutdown()
    server.server_close()


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        return str(response.read().decode())


def test_silent_connections_are_closed_and_give_their_places_back(port: int) -> None:
    assert "one 1.0" in scraped(port)
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(4)]
    silent[0].sendall(b"GET /metrics HTTP/1.1\r\n")
    for each in silent:
        assert each.recv(1) == b"", "closed after the time"
    assert "one 1.0" in scraped(port)


def test_connections_beyond_the_places_are_closed(port: int) -> None:
    held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(4)]
    further = socket.create_connection(("127.0.0.1", port), timeout=0.5)
    assert further.recv(1) == b"", "closed at once, before any of the others"
    for each in held:
        each.close()
