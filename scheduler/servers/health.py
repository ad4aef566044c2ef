"""Accepts the HTTP port's connections on a separate thread, which answers liveness probes itself.

    listener ── accept ──► first bytes: GET /healthz ──► the thread answers
                                        anything else ─► the connection goes to the event loop, with nothing read

The answer does not wait for a request, a step or the event loop. It depends only on when the loop last ran: a busy
server is alive, and a server whose loop is stuck is not.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from quire.loop_heartbeat import liveness
from scheduler.servers.descriptors import max_http_connections
from scheduler.telemetry.limits import SILENT_CONNECTIONS, limited

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.loop_heartbeat import LoopHeartbeat

STUCK_AFTER_S = 30.0
"""Time without a heartbeat after which the event loop counts as stuck. Slow work such as tokenising runs in threads."""

MAX_SILENT = 256
"""Maximum number of connections that have sent nothing yet, unless descriptors are scarcer. The oldest is closed
to make room for another."""

MAX_SILENT_S = 10.0
"""Time after which a connection that has sent nothing is closed."""

_PROBE = b"GET /healthz "
_MAX_PROBE_BYTES = 8192


class HealthListener:
    """Accepts connections of `listeners` between `open` and `close`, and answers the liveness probes among them.

    forward  called on the listener's thread with each other connection, which then belongs to the callee
    """

    def __init__(
        self, listeners: list[socket.socket], heartbeat: LoopHeartbeat, forward: Callable[[socket.socket], None]
    ) -> None:
        self._listeners = listeners
        self._heartbeat = heartbeat
        self._forward = forward
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._max_silent = max(1, min(MAX_SILENT, max_http_connections() // 2))
        # With the time at which each was accepted, oldest first.
        self._silent: dict[socket.socket, float] = {}
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def open(self) -> None:
        for listener in (*self._listeners, self._woken):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Closes the listeners, and returns when the thread has ended."""
        if self._thread.is_alive():
            self._waker.send(b".")
            self._thread.join()
        self._selector.close()
        for each in (*self._listeners, *self._silent, self._waker, self._woken):
            each.close()

    def _run(self) -> None:
        while True:
            ready = self._selector.select(MAX_SILENT_S / 4 if self._silent else None)
            self._close_silent()
            for key, _ in ready:
                if key.fileobj is self._woken:
                    return
                connection = cast("socket.socket", key.fileobj)
                if connection not in self._silent and connection not in self._listeners:
                    continue  # it has just been closed
                (self._accept if connection in self._listeners else self._classify)(connection)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # the client has disconnected already
            return
        except OSError:  # probably out of file descriptors: another connection must close first
            time.sleep(0.05)
            return
        connection.setblocking(False)
        if len(self._silent) >= self._max_silent:
            self._close(next(iter(self._silent)))
        self._silent[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _close_silent(self) -> None:
        """Closes the connections that have been silent for too long."""
        latest_s = time.monotonic() - MAX_SILENT_S
        for connection, accepted_s in list(self._silent.items()):
            if accepted_s > latest_s:
                return
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        limited(SILENT_CONNECTIONS)
        self._selector.unregister(connection)
        del self._silent[connection]
        connection.close()

    def _classify(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._silent[connection]
        try:
            start = connection.recv(_MAX_PROBE_BYTES, socket.MSG_PEEK)
            # A probe that arrives in pieces goes to the event loop, like any other request.
            is_probe = start.startswith(_PROBE) and start.endswith(b"\r\n\r\n")
            if is_probe:
                connection.recv(_MAX_PROBE_BYTES)
                connection.sendall(self._answer())
        except OSError:
            connection.close()
            return
        if is_probe:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()
        else:
            self._forward(connection)

    def _answer(self) -> bytes:
        status, text = liveness(self._heartbeat.silent_s(), STUCK_AFTER_S)
        return (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text)}\r\n"
            f"Connection: close\r\n\r\n{text}"
        ).encode()


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens on every address of the host, or for port 0 on any free port of the first one. Raises OSError."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in addresses[: None if port else 1]:
            listeners.append(_listen(family, address))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen(family: int, address: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)  # type: ignore[arg-type]  # getaddrinfo returned it
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
