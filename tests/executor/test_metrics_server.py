"""Connections to an executor's metrics port are few, and none is silent for long."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from executor import metrics_server
from executor.metrics_server import STUCK_AFTER_S, serve_metrics


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 4)
    assert metrics_server._Handler.timeout == metrics_server.CONNECTION_TIMEOUT_S
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)
    registry = CollectorRegistry()
    Gauge("one", "1", registry=registry).set(1)
    server = serve_metrics("127.0.0.1", 0, registry, lambda: 0.0)
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


@pytest.mark.parametrize(("silent_s", "expected"), [(0.0, 200), (STUCK_AFTER_S - 0.1, 200), (STUCK_AFTER_S + 0.1, 503)])
def test_healthz_says_whether_the_event_loop_runs(silent_s: float, expected: int) -> None:
    server = serve_metrics("127.0.0.1", 0, CollectorRegistry(), lambda: silent_s)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/healthz", timeout=30) as response:
            status = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    finally:
        server.shutdown()
        server.server_close()
    assert status == expected
