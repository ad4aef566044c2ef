"""The HTTP port's door, on a thread of its own: it says itself whether this process lives, and lets in everybody else.

    listener ── accept ──► first bytes: GET /healthz ──► the thread answers
                                        anything else ─► the connection goes to the event loop, with nothing read

So this answer waits for no request, no step and no turn of the event loop; it only looks at when that last turned. A
server that is merely busy lives; one whose loop has stopped does not, and the thread can still say so.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_INTERVAL_S = 0.5
STUCK_AFTER_S = 30.0
"""An event loop that has not turned for so long has stopped. What is slow, such as tokenising, runs elsewhere."""

MAX_UNDECIDED = 256
"""Connections that have said nothing yet. More of them are let in as they are."""

_PROBE = b"GET /healthz "
_MAX_PROBE_BYTES = 8192


class Pulse:
    """Of an event loop. `start` there; `silent_s` anywhere."""

    def __init__(self) -> None:
        self._beat_s = time.monotonic()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._beat_s = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(BEAT_INTERVAL_S, self.start)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    @property
    def silent_s(self) -> float:
        """Since the last beat."""
        return time.monotonic() - self._beat_s


class Door:
    """Takes what comes to `listeners` from `open` on, and closes them in `close`.

    let_in  called on the door's thread with a connection that is no probe; it is the callee's then
    """

    def __init__(self, listeners: list[socket.socket], pulse: Pulse, let_in: Callable[[socket.socket], None]) -> None:
        self._listeners = listeners
        self._pulse = pulse
        self._let_in = let_in
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._undecided: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)

    def open(self) -> None:
        for listener in (*self._listeners, self._woken):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended."""
        if self._thread.is_alive():
            self._waker.send(b".")
            self._thread.join()
        self._selector.close()
        for each in (*self._listeners, *self._undecided, self._waker, self._woken):
            each.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                connection = cast("socket.socket", key.fileobj)
                (self._accept if connection in self._listeners else self._decide)(connection)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # it went away again
            return
        except OSError:  # no more file descriptors, most likely: somebody has to go first
            time.sleep(0.05)
            return
        connection.setblocking(False)
        if len(self._undecided) >= MAX_UNDECIDED:
            self._let_in(connection)
        else:
            self._undecided.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _decide(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._undecided.discard(connection)
        try:
            start = connection.recv(_MAX_PROBE_BYTES, socket.MSG_PEEK)
            # A probe that comes in pieces is answered by the event loop, like everything that is not quite one.
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
            self._let_in(connection)

    def _answer(self) -> bytes:
        silent_s = self._pulse.silent_s
        is_stuck = silent_s > STUCK_AFTER_S
        status = "503 Service Unavailable" if is_stuck else "200 OK"
        text = f"stuck: the event loop has not turned for {silent_s:.0f} s\n" if is_stuck else "ok\n"
        return (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text)}\r\n"
            f"Connection: close\r\n\r\n{text}"
        ).encode()


def listen(host: str, port: int) -> list[socket.socket]:
    """On every address of the host (port 0: on the first one, at any free port). Raises OSError."""
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
        listener.bind(address)  # type: ignore[arg-type]  # as getaddrinfo gave it
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
