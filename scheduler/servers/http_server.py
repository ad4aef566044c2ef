"""The scheduler's HTTP side: metrics, whether it lives and is ready, and the live page."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from aiohttp import web

from quire.addresses import HostPort, at_port, listen_error
from scheduler.live.browser_safety import HEADERS, AllowedHosts
from scheduler.servers.health import Door, Pulse, listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from scheduler.engine.engine import Engine
    from scheduler.live.page import LivePage
    from scheduler.telemetry.metrics import SchedulerMetrics

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"

MACHINES_PATHS = ("/metrics", "/healthz", "/readyz")
"""Asked for by machines, under whatever name they know, and no secret."""

SHUTDOWN_TIMEOUT_S = 0.01
"""After the grace, if any: a completion may wait for tokens that never come. Not 0, which is no limit to aiohttp."""


class HttpServer:
    """
    GET /metrics   Prometheus' text format, or OpenMetrics with exemplars, as the client accepts
    GET /healthz   200 while the event loop turns, else 503; answered beside it (`scheduler.servers.health`)
    GET /readyz    200 while requests are served, else 503 and the reason
    GET /          the live page, if there is one (`scheduler.live.page`)
    """

    def __init__(
        self,
        engine: Engine,
        metrics: SchedulerMetrics,
        live_page: LivePage | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """allowed_hosts: names under which the live page is asked for, beside that of `listen` and localhost."""
        self._engine = engine
        self._metrics = metrics
        self._allowed_hosts = allowed_hosts
        self._hosts = AllowedHosts(*allowed_hosts)

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

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
        # A handler whose client has gone is cancelled: a completion that nobody reads is not computed.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        self._pulse = Pulse()
        self._door: Door | None = None
        self._entering: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, address: str) -> None:
        """Binds it (host:port) and serves. Raises AddressInUse or AddressUnusable."""
        wanted = HostPort.parse(address)
        self._hosts = AllowedHosts(wanted.host, *self._allowed_hosts)
        await self._runner.setup()
        try:
            listeners = listen(wanted.host, wanted.port)
        except OSError as error:
            raise listen_error(address, error) from error
        self.address = at_port(address, listeners[0].getsockname()[1])
        self._pulse.start()
        loop = asyncio.get_running_loop()
        self._door = Door(listeners, self._pulse, lambda connection: _call_soon(loop, self._let_in, connection))
        self._door.open()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no new requests; those that are open have `grace_s` to end, then they are cancelled."""
        if self._door is not None:
            self._door.close()
        self._pulse.stop()
        server = self._runner.server
        if server is not None and grace_s:
            server.pre_shutdown()
            await self._runner.shutdown()  # those who watch the live page need no grace
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await server.shutdown(None)
        await self._runner.cleanup()

    def _let_in(self, connection: socket.socket) -> None:
        entering = asyncio.create_task(self._enter(connection))
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)

    async def _enter(self, connection: socket.socket) -> None:
        server = self._runner.server
        if server is None:  # stopped meanwhile
            connection.close()
            return
        await asyncio.get_running_loop().connect_accepted_socket(server, connection)

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in MACHINES_PATHS or self._hosts.allow(request):
            return await handler(request)
        text = "this host name is not one of --http-allowed-hosts\n"
        return web.Response(status=421, text=text, headers=HEADERS)  # Misdirected Request

    async def _show_metrics(self, request: web.Request) -> web.Response:
        content_type, page = self._metrics.answer(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _show_health(self, request: web.Request) -> web.Response:
        """For a probe that the door did not know as one: the loop turns, or this would not run."""
        return web.Response(text="ok\n")

    async def _show_readiness(self, request: web.Request) -> web.Response:
        return web.Response(text=f"{self._engine.readiness}\n", status=200 if self._engine.is_ready else 503)


def _call_soon(
    loop: asyncio.AbstractEventLoop, let_in: Callable[[socket.socket], None], connection: socket.socket
) -> None:
    try:
        loop.call_soon_threadsafe(let_in, connection)
    except RuntimeError:  # the loop is closed
        connection.close()
