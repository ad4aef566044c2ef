"""The HTTP server of an executor's metrics: a thread for each connection, few connections, and none that is silent.

GET /healthz   200 while the event loop runs, otherwise 503. A long step does not stop the loop
GET …          the metrics
"""

import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from quire.loop_heartbeat import liveness

MAX_CONNECTIONS = 32
"""Connections at a time; more are closed. Each has a thread and a descriptor, which the plan stream needs, too."""

CONNECTION_TIMEOUT_S = 10.0
"""Time after which a connection is closed that sends nothing, or reads nothing of its answer."""

STUCK_AFTER_S = 5.0
"""Time without a heartbeat after which the event loop counts as stuck. Probes need several failures in a row."""


def serve_metrics(host: str, port: int, registry: CollectorRegistry, loop_silent_s: Callable[[], float]) -> WSGIServer:
    """Serves /metrics and /healthz from a thread of its own, until `shutdown`. Raises OSError if it cannot listen.

    loop_silent_s  returns the seconds since the event loop last ran
    """
    metrics = make_wsgi_app(registry)

    def answer(environ: Any, start_response: Any) -> Any:
        if environ["PATH_INFO"] != "/healthz":
            return metrics(environ, start_response)
        status, text = liveness(loop_silent_s(), STUCK_AFTER_S)
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [text.encode()]

    class Server(_Server):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    server = make_server(host, port, answer, Server, _Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


class _Handler(WSGIRequestHandler):
    timeout = CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns whether there is a place for a connection; otherwise it is closed."""
        return self._places.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that break off."""
