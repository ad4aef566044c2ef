"""The scheduler's HTTP side: metrics, whether it lives and is ready, and the live page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from scheduler.config import split_address
from scheduler.engine import ServerState
from scheduler.grpc_server import address_error

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.live.page import LivePage
    from scheduler.metrics import SchedulerMetrics


class HttpServer:
    """
    GET /metrics   Prometheus' text format, or OpenMetrics with exemplars, as the client accepts
    GET /healthz   200 while this process answers (when the engine's loop fails, the process ends)
    GET /readyz    200 while requests are served, else 503 and the reason
    GET /          the live page, if there is one (`scheduler.live.page`)
    """

    def __init__(self, engine: Engine, metrics: SchedulerMetrics, live_page: LivePage | None = None) -> None:
        self._engine = engine
        self._metrics = metrics
        app = web.Application()
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
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        self.address = ""

    async def start(self, listen: str) -> None:
        """Binds `listen` (host:port) and serves. Raises AddressInUse or AddressUnusable."""
        host, port = split_address("http_listen", listen)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise address_error(listen, error) from error
        self.address = f"{listen.rpartition(':')[0]}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        content_type, page = self._metrics.answer(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _show_health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_readiness(self, request: web.Request) -> web.Response:
        state = self._engine.state
        return web.Response(text=f"{state.value}\n", status=200 if state is ServerState.SERVING else 503)
