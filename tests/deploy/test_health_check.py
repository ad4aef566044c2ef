"""The health check of containers: its exit code, and when it kills the service."""

import contextlib
import errno
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy import health_check
from quire.addresses import with_port
from quire.tls import ssl_context
from tests.support.certificates import Authority

Check = Callable[..., int]


@pytest.fixture
def kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list with one entry each time the service would have been killed; uses a fresh state file."""
    kills: list[str] = []
    monkeypatch.setattr(health_check, "STATE", tmp_path / "state")
    monkeypatch.setattr(health_check, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(health_check, "kill_service", lambda: kills.append("killed"))
    return kills


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["health_check.py", *arguments])
        return health_check.main()

    return run


@pytest.fixture
def service() -> Iterator[tuple[str, health.HealthServicer]]:
    """Runs a gRPC server with a health service; yields its address and the servicer."""
    server, servicer = grpc.server(ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address, servicer
    server.stop(0)


@pytest.fixture
def alive() -> Iterator[str]:
    """Runs a web server that answers; yields its URL."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/healthz"
    server.shutdown()
    server.server_close()


def unused_address() -> str:
    """Returns an address where no server listens."""
    return with_port("127.0.0.1:0")


def test_the_exit_code_is_the_status_of_the_service(
    kills: list[str], check: Check, service: tuple[str, health.HealthServicer]
) -> None:
    address, servicer = service
    assert check(address) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert check(address) == 1
    assert check(unused_address()) == 1
    assert kills == []


def test_no_proxy_is_asked(kills: list[str], check: Check, alive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker can set one in all containers."""
    monkeypatch.setenv("http_proxy", f"http://{unused_address()}")
    assert check("--alive", alive) == 0


@pytest.mark.parametrize("needs_certificate", [False, True])
def test_a_service_with_tls_is_alive_while_it_ends_handshakes(
    kills: list[str], check: Check, tmp_path: Path, needs_certificate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway answers nothing in clear text once it has a certificate, and may want one of its clients."""
    monkeypatch.setattr(health_check, "TIMEOUT_S", 2.0)
    context = ssl_context(Authority.create(tmp_path).issue("gateway", "DNS:gateway"), needs_certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        secure = context.wrap_socket(listener, server_side=True)
        answering = threading.Thread(target=accept, args=(secure, 2))
        answering.start()
        assert check("--alive", f"http://127.0.0.1:{port}/healthz") == 1
        assert check("--alive", f"https://127.0.0.1:{port}/healthz", "--kill-after", "1") == 0
        answering.join()
        assert check("--alive", f"https://127.0.0.1:{port}/healthz", "--kill-after", "1") == 1, "it hangs"
        secure.close()
    assert kills == ["killed"]


def accept(listener: socket.socket, number: int) -> None:
    """Accepts connections, and ignores those that fail."""
    for _ in range(number):
        with contextlib.suppress(OSError):
            listener.accept()[0].close()


def test_a_service_that_has_served_and_hangs_is_killed(
    kills: list[str], check: Check, service: tuple[str, health.HealthServicer]
) -> None:
    address, servicer = service
    assert check(address, "--kill-after", "3") == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert [check(address, "--kill-after", "3") for _ in range(2)] == [1, 1]
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert check(address, "--kill-after", "3") == 0, "the service has recovered, so the count restarts"
    failing = unused_address()
    assert [(check(failing, "--kill-after", "3"), len(kills)) for _ in range(3)] == [(1, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("content", ["", "x"])
def test_a_count_that_cannot_be_read_begins_again(
    kills: list[str], check: Check, service: tuple[str, health.HealthServicer], content: str
) -> None:
    """A disk that was full has left an empty file."""
    address, _ = service
    health_check.STATE.write_text(content)
    failing = unused_address()
    assert [check(failing, "--kill-after", "2") for _ in range(2)] == [1, 1]
    assert kills == ["killed"]
    health_check.STATE.write_text(content)
    assert check(address, "--kill-after", "2") == 0
    assert health_check.STATE.read_text() == "0"


def test_a_full_disk_does_not_change_the_result(
    kills: list[str],
    check: Check,
    service: tuple[str, health.HealthServicer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, _ = service
    assert check(address, "--kill-after", "3") == 0
    assert check(unused_address(), "--kill-after", "3") == 1
    with monkeypatch.context() as full:

        def write(path: Path, text: str) -> None:
            path.touch()  # the name has room, the content has none
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(Path, "write_text", write)
        assert [check(unused_address(), "--kill-after", "3"), check(address, "--kill-after", "3")] == [1, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert health_check.STATE.read_text() == "1", "the count of before"
    assert kills == []


def test_a_service_that_has_not_served_yet_is_not_killed(kills: list[str], check: Check) -> None:
    failing = unused_address()
    assert [check(failing, "--kill-after", "2") for _ in range(5)] == [1] * 5
    assert kills == []


def test_a_scheduler_is_not_killed_because_its_executor_is_away(
    kills: list[str], check: Check, service: tuple[str, health.HealthServicer], alive: str
) -> None:
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert [check(address, "--alive", alive, "--kill-after", "2") for _ in range(4)] == [1] * 4
    assert kills == []
    gone = f"http://{unused_address()}/healthz"
    assert [check(address, "--alive", gone, "--kill-after", "2") for _ in range(2)] == [1, 1]
    assert kills == ["killed"]
