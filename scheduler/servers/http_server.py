"""The scheduler's HTTP server: metrics, liveness, readiness and the live page."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

from aiohttp import web

from quire.addresses import HostPort, at_port, listen_error
from quire.http.allowed_hosts import AllowedHosts
from quire.http.runner import http_runner
from quire.http.slow_readers import SlowReaders
from quire.http.static_files import HEADERS
from quire.http.unread_bodies import UnreadBodies
from quire.loop_heartbeat import LoopHeartbeat
from quire.tls import ssl_context
from scheduler.core import QueueFull
from scheduler.servers.access import Access
from scheduler.servers.descriptors import max_http_connections
from scheduler.servers.health import HealthListener, listen
from scheduler.servers.http_access import may_observe, refusal
from scheduler.servers.read_budget import ReadBudget
from scheduler.telemetry.limits import OPEN_CONNECTIONS, SILENT_CONNECTIONS, STALLED_READERS, limited

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from scheduler.engine.engine import Engine
    from scheduler.live.page import LivePage
    from scheduler.telemetry.metrics import SchedulerMetrics

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"

MACHINES_PATHS = ("/metrics", "/healthz", "/readyz")
"""Paths for machines. They hold no secrets, so they are served under every host name; browsers get no exemplars."""

FIRST_REQUEST_S = 10.0
"""Time in which a connection has to send the header of its first request."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Time that a client has for the handshake of TLS."""


class HttpServer:
    """Serves these paths:

    GET /metrics   Prometheus' text format, or OpenMetrics with exemplars if the client accepts it
    GET /healthz   200 while the event loop runs, otherwise 503; answered by another thread (`scheduler.servers.health`)
    GET /readyz    200 while requests are served, otherwise 503; with the state, and for observers its reason
    GET /          the live page, if there is one (`scheduler.live.page`)

    Under TLS, a probe may still ask for /healthz in clear text: another thread answers it before any handshake.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: SchedulerMetrics,
        live_page: LivePage | None = None,
        allowed_hosts: Sequence[str] = (),
        access: Access | None = None,
        stalled_reader_timeout_s: float = 60.0,
    ) -> None:
        """Creates the server. `allowed_hosts` may serve the live page, as well as localhost and the listening host."""
        self._engine = engine
        self._metrics = metrics
        self._allowed_hosts = allowed_hosts
        self._hosts = AllowedHosts(*allowed_hosts)
        self._access = access or Access()
        self._tls: ssl.SSLContext | None = None
        if self._access.tls is not None:
            self._tls = ssl_context(self._access.tls, self._access.requires_client_certificate)

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                response = await self._guarded(request, handler)
            except web.HTTPException as error:
                await self._unread_bodies.discard(request, error)
                raise
            await self._unread_bodies.discard(request, response)
            return response

        app = web.Application(middlewares=[guard])
        app.add_routes(
            [
                web.get("/metrics", self._show_metrics),
                web.get("/healthz", self._show_health),
                web.get("/readyz", self._show_readiness),
            ]
        )
        if live_page is not None:
            live_page.add_to(app)
        self._runner = http_runner(app)
        self._reads = ReadBudget()
        self._probes = ReadBudget(max_waiting=None)  # a probe that is refused would look like an unready server
        self._max_connections = max_http_connections()
        self._has_begun: WeakSet[asyncio.BaseTransport] = WeakSet()
        self._heartbeat = LoopHeartbeat()
        self._listener: HealthListener | None = None
        self._accepting: set[asyncio.Task[None]] = set()
        self._unread_bodies = UnreadBodies()
        self._readers = SlowReaders(stalled_reader_timeout_s, lambda: limited(STALLED_READERS))
        self.address = ""

    async def start(self, address: str) -> None:
        """Listens on an address (host:port) and serves. Raises AddressInUse or AddressUnusable."""
        wanted = HostPort.parse(address)
        self._hosts = AllowedHosts(wanted.host, *self._allowed_hosts)
        await self._runner.setup()
        if self._runner.server is not None:
            self._readers.start(self._runner.server)
        try:
            listeners = listen(wanted.host, wanted.port)
        except OSError as error:
            raise listen_error(address, error) from error
        self.address = at_port(address, listeners[0].getsockname()[1])
        self._heartbeat.start()
        loop = asyncio.get_running_loop()
        self._listener = HealthListener(
            listeners, self._heartbeat, lambda connection: _call_soon(loop, self._accept, connection)
        )
        self._listener.open()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, and cancels the open ones after `grace_s`."""
        if self._listener is not None:
            self._listener.close()
        self._heartbeat.stop()
        self._readers.stop()
        server = self._runner.server
        if server is not None and grace_s:
            server.pre_shutdown()
            await self._runner.shutdown()  # closes the live page's sockets, which need no grace period
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await server.shutdown(None)
        await self._runner.cleanup()

    def _accept(self, connection: socket.socket) -> None:
        server = self._runner.server
        # The server was stopped meanwhile, or holds as many connections as it has descriptors for. aiohttp does not
        # know those whose handshake has not ended.
        if server is None or len(server.connections) + len(self._accepting) >= self._max_connections:
            limited(OPEN_CONNECTIONS)
            connection.close()
            return
        task = asyncio.create_task(self._serve(server, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _serve(self, server: web.Server, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = None if self._tls is None else HANDSHAKE_TIMEOUT_S
        with suppress(OSError):  # a handshake that fails or takes too long closes the connection
            transport, _ = await loop.connect_accepted_socket(
                server, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
            loop.call_later(FIRST_REQUEST_S, self._close_unless_begun, transport)

    def _close_unless_begun(self, transport: asyncio.BaseTransport) -> None:
        """Closes a connection that has not sent the header of a request. aiohttp would wait for it for ever."""
        if transport not in self._has_begun and not transport.is_closing():
            limited(SILENT_CONNECTIONS)
            transport.close()

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport is not None:
            self._has_begun.add(request.transport)
        host = request.headers.get("Host")
        if request.path in MACHINES_PATHS or host is None or self._hosts.allow(host):
            refused = await refusal(request, self._access)
            return await handler(request) if refused is None else refused
        text = "this host name is not one of --http-allowed-hosts\n"
        return web.Response(status=421, text=text, headers=HEADERS)  # Misdirected Request

    async def _show_metrics(self, request: web.Request) -> web.Response:
        # Exemplars name requests. A page of another site, whose name was made to stand for this address, may not read
        # them: its browser sends this header, which scripts cannot leave out, and Prometheus does not.
        is_foreign = "Accept-Language" in request.headers and not self._hosts.allow(request.headers.get("Host", ""))
        try:
            async with self._reads.turn():
                content_type, page = self._metrics.answer("" if is_foreign else request.headers.get("Accept", ""))
        except QueueFull as error:
            raise web.HTTPTooManyRequests(headers={"Retry-After": "1"}, text=f"{error}\n") from None
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _show_health(self, request: web.Request) -> web.Response:
        """Answers a probe that HealthListener did not recognise. If this handler runs, the event loop is alive."""
        return web.Response(text="ok\n")

    async def _show_readiness(self, request: web.Request) -> web.Response:
        async with self._probes.turn():
            pass
        # The reason can name hosts and processes.
        is_observer = await may_observe(request, self._access)
        text = self._engine.readiness if is_observer else self._engine.state.value
        return web.Response(text=f"{text}\n", status=200 if self._engine.is_ready else 503)


def _call_soon(
    loop: asyncio.AbstractEventLoop, accept: Callable[[socket.socket], None], connection: socket.socket
) -> None:
    try:
        loop.call_soon_threadsafe(accept, connection)
    except RuntimeError:  # the loop is closed
        connection.close()
