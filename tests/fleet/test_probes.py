"""When a part hangs."""

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet import probes
from fleet.parts import Role
from fleet.probes import SILENT_S, Liveness, LoadProbe, answers


@contextmanager
def server(reply: bytes | None) -> Iterator[str]:
    """Answers every connection with these bytes; None: accepts it and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                if reply is not None:
                    connection.recv(1024)
                    connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", True), (b"HTTP/1.1 503 No\r\n\r\n", False), (b"", False), (None, False)],
)
def test_only_a_200_in_time_counts(reply: bytes | None, expected: bool) -> None:
    with server(reply) as address:
        assert answers(address, 0.3) is expected


def test_a_server_that_closes_the_connection_lives() -> None:
    """A gateway does so when it has as many connections as it may have."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=refuse, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert all(answers(address, 5.0) for _ in range(20))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "", "nowhere"])
def test_an_address_without_a_server_does_not_answer(address: str) -> None:
    assert not answers(address, 0.3)


def test_a_part_hangs_after_enough_failed_checks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    is_up = True
    monkeypatch.setattr(probes, "answers", lambda address: is_up)
    liveness = Liveness(Role.SCHEDULER, interval_s=1e-9)
    num_checks = 0
    monkeypatch.setattr(liveness, "_max_failed", 20)
    assert not liveness.is_hung("a:1")
    is_up = False
    for num_checks in range(1, 30):  # noqa: B007
        if liveness.is_hung("a:1"):
            break
    assert num_checks == 20
    is_up = True
    assert not liveness.is_hung("a:1"), "it answers again"
    assert Liveness(Role.EXECUTOR)._max_failed == SILENT_S[Role.EXECUTOR]


@pytest.mark.parametrize("role", Role)
def test_a_part_whose_metrics_answer_and_whose_event_loop_does_not_hangs(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics are served by a thread of their own, whatever the event loop does."""
    asked = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/metrics" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        liveness = Liveness(role, interval_s=0.01)
        monkeypatch.setattr(liveness, "_max_failed", 2)
        address = f"127.0.0.1:{page.server_port}"
        until_s = time.monotonic() + 30
        while not liveness.is_hung(address):
            assert time.monotonic() < until_s, asked
            time.sleep(0.02)
        page.shutdown()


def test_a_part_that_is_asked_more_often_does_not_hang_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(probes, "answers", lambda address: asked.append(1))
    liveness = Liveness(Role.SCHEDULER, interval_s=1000.0)
    monkeypatch.setattr(liveness, "_max_failed", 2)
    assert not any(liveness.is_hung("a:1") for _ in range(100))
    assert len(asked) == 1


def test_a_scheduler_that_does_not_answer_has_no_load(tmp_path: Path) -> None:
    probe = LoadProbe(f"unix:{tmp_path}/none.sock")
    assert probe.load() is None
    probe.close()
