"""The gateway's HTTP server: routes, bounds of connections, the form of errors, and the end."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from aiohttp import web

from gateway.api.anthropic import parse_message
from gateway.api.anthropic_answer import error_body as anthropic_error
from gateway.api.chat import parse_chat
from gateway.api.completions import parse_completion
from gateway.api.errors import ApiError, from_quire_error, unavailable
from gateway.api.responses import parse_response
from gateway.http.chat_page import UNKNOWN_HOST, ChatPage
from gateway.http.generation import GenerationHandler
from gateway.http.model_tools import ServedModelTools
from gateway.http.pages import Pages
from gateway.http.request_ids import id_headers, new_id, request_id
from gateway.http.served_models import ServedModels
from gateway.metrics import GatewayMetrics
from quire.addresses import HostPort, at_port, is_local, listen_error
from quire.errors import InternalError
from quire.http.allowed_hosts import AllowedHosts
from quire.http.browsers import is_of_another_origin, is_sent_by_a_browser
from quire.http.json_bodies import BodyBounds, BodyRefused, JsonBodies
from quire.http.runner import http_runner
from quire.http.slow_readers import SlowReaders
from quire.http.unread_bodies import UnreadBodies
from quire.log_rate import RateLimit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from gateway.config import GatewayConfig
    from gateway.schedulers.schedulers import Schedulers

    Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"

log = logging.getLogger(__name__)

REQUEST_FAILED = "request failed"
log.addFilter(RateLimit(REQUEST_FAILED, per_second=10))  # a refused request costs its client nothing

MAX_JSON_MARKS = 250_000
"""Most commas, colons and opening brackets of a body. A prompt of 200,000 token ids has fewer."""

MAX_HELD_BYTES = 64 << 20
"""Bytes of all bodies that are arriving at the same time."""

MAX_HELD_BYTES_OF_AN_ADDRESS = 16 << 20
"""The same for the clients of one network address."""

MESSAGES = "/v1/messages"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
"""The paths of Anthropic's API, whose errors have another form."""

FIRST_REQUEST_S = 10.0
"""Time in which a connection has to send the header of its first request."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Time that a client has for the handshake of TLS. It may not exceed FIRST_REQUEST_S, for which handshakes count."""

_ACCEPT_S = 1.0
"""Time after which an accepted connection has begun, or ended."""


class GatewayServer:
    """Serves the API of OpenAI, vLLM's additions to it, and the chat page."""

    def __init__(self, schedulers: Schedulers, config: GatewayConfig, tls: ssl.SSLContext | None = None) -> None:
        self._config = config
        self._hosts = AllowedHosts(*config.hosts)
        self._tls = tls
        self.metrics = GatewayMetrics(schedulers)
        bounds = BodyBounds(config.max_body_bytes, MAX_JSON_MARKS, MAX_HELD_BYTES, MAX_HELD_BYTES_OF_AN_ADDRESS)
        bodies = JsonBodies(bounds)
        models = ServedModels(schedulers, config.model_names)
        tools = ServedModelTools(schedulers, config.tool_format)
        self._readers = SlowReaders(config.stalled_reader_timeout_s, self.metrics.slow_readers.inc)
        self.generation = GenerationHandler(
            schedulers, models, tools, bodies, self.metrics, self._readers, config.max_requests
        )
        self._pages = Pages(
            schedulers,
            models,
            bodies,
            self.metrics,
            self.generation.requests,
            shows_strangers=(is_local(config.listen) or config.allow_anonymous) and schedulers.is_stranger,
        )
        self._silent: dict[asyncio.Protocol, float] = {}  # new connections without a request, and when they began
        self._unread_bodies = UnreadBodies()
        self._listening: asyncio.Server | None = None
        self.address = ""
        app = web.Application(middlewares=[self._middleware()])
        self._add_routes(app)
        for resource in app.router.resources():
            if resource.canonical.startswith("/v1/"):
                self.metrics.may_fail(resource.canonical, "500", "503")
        ChatPage(config.live_page, self._hosts).add_to(app)
        self._runner = http_runner(app)

    def _add_routes(self, app: web.Application) -> None:
        pages, serve = self._pages, self.generation.serve
        app.add_routes(
            [
                web.post("/v1/chat/completions", partial(serve, parse=parse_chat)),
                web.post("/v1/completions", partial(serve, parse=parse_completion)),
                web.post("/v1/responses", partial(serve, parse=parse_response)),
                web.post(MESSAGES, partial(serve, parse=parse_message)),
                web.post(COUNT_TOKENS, pages.count_tokens),
                web.get("/v1/models", pages.list_models),
                web.get("/v1/models/{model:.+}", pages.show_model),
                web.post("/tokenize", pages.tokenize),
                web.post("/detokenize", pages.detokenize),
                web.get("/tokenizer_info", pages.show_tokenizer),
                web.get("/health", pages.show_health),
                web.get("/healthz", pages.show_liveness),
                web.get("/version", pages.show_version),
                web.get("/metrics", pages.show_metrics),
            ]
        )

    async def start(self) -> None:
        """Listens and serves. Raises AddressInUse or AddressUnusable."""
        await self._runner.setup()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner was set up without a server")
        wanted = HostPort.parse(self._config.listen)
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                lambda: self._protocol(server),
                wanted.host,
                wanted.port,
                ssl=self._tls,
                reuse_address=True,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:
            raise listen_error(self._config.listen, error) from error
        self.address = at_port(self._config.listen, self._listening.sockets[0].getsockname()[1])
        self._readers.start(server)

    async def stop(self, drain_timeout_s: float = 0.0) -> bool:
        """Refuses new requests, and waits for the open ones. Returns False if some had to be cancelled.

        It listens until the end, so that /healthz can be asked meanwhile. Connections close without a request, and
        otherwise after it, so that the next request of their clients goes to another gateway.
        """
        self._close_idle()
        has_drained = await self.generation.requests.drain(drain_timeout_s)
        if self._listening is not None:
            self._listening.close()
        self._readers.stop()
        await self._runner.cleanup()
        return has_drained

    def _close_idle(self) -> None:
        """Closes connections that wait for a further request. aiohttp does this only when it closes all."""
        for connection in self._runner.server.connections if self._runner.server is not None else ():
            waiter = connection._waiter  # it is done if a request has just arrived
            if waiter is not None and not waiter.done() and connection not in self._silent:
                connection.force_close()

    def _protocol(self, server: web.Server) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        now_s = time.monotonic()
        began_s = now_s - (_ACCEPT_S if self._tls is None else HANDSHAKE_TIMEOUT_S)
        # aiohttp does not know those that the event loop has accepted in one go, or whose handshake has not ended.
        beginning = {each for each, since_s in self._silent.items() if _has_no_transport(each) and since_s > began_s}
        if len(beginning | set(server.connections)) >= self._config.max_connections:
            self.metrics.refused_connections.inc()
            return _Refusal()
        protocol = server()
        self._silent[protocol] = now_s
        asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._close_if_silent, protocol)
        return protocol

    def _close_if_silent(self, protocol: asyncio.Protocol) -> None:
        """Closes a connection that has not sent the header of a request. aiohttp would wait for it for ever."""
        if protocol not in self._silent:
            return
        del self._silent[protocol]
        transport: asyncio.Transport | None = getattr(protocol, "transport", None)
        if transport is not None and not transport.is_closing():
            transport.close()

    def _middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        @web.middleware
        async def in_form(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._silent.pop(request.protocol, None)
            new_id()
            resource = request.match_info.route.resource
            path = _known_path(request) if resource is None else resource.canonical
            try:
                response = await self._guarded(request, handler)
            except ApiError as error:
                _log_failure(request, path, error)
                response = _error_response(error, request.path)
            except ConnectionError:
                raise
            except Exception:
                log.exception("a request failed because of a bug", extra={"request_id": request_id()})
                bug = from_quire_error(InternalError("internal error; see the gateway's log"), {})
                response = _error_response(bug, request.path)
            if not response.prepared:
                response.headers.update(id_headers())
            self.metrics.requests.labels(path, str(response.status)).inc()
            if self.generation.requests.is_draining:
                response.force_close()
            await self._unread_bodies.discard(request, response)
            return response

        return in_form

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises ApiError, also for unknown paths and for pages of other sites."""
        if is_of_another_origin(request):
            raise _forbidden("a page of another origin may not use this API")
        if is_sent_by_a_browser(request) and not self._hosts.allow(request.host):
            raise _forbidden(UNKNOWN_HOST)
        try:
            return await handler(request)
        except BodyRefused as refused:
            message = f"the body {refused.problem}"
            raise unavailable(message) if refused.status == 503 else ApiError(message, status=refused.status) from None
        except web.HTTPException as error:
            message = f"{error.reason} ({request.method} {request.path[:200]})"
            raise ApiError(message, status=error.status, allow=error.headers.get("Allow")) from None


def _log_failure(request: web.Request, path: str, error: ApiError) -> None:
    """Logs a request that fails before its answer begins. Messages below 500 may quote the request, so they are left
    out.
    """
    is_of_server = error.status >= 500
    fields = {"request_id": request_id(), "client": request.remote, "path": path, "status": error.status}
    fields |= {"code": error.code, "reason": error.message if is_of_server else None}
    log.log(logging.WARNING if is_of_server else logging.INFO, REQUEST_FAILED, extra=fields)


def _forbidden(message: str) -> ApiError:
    return ApiError(message, status=403, kind="permission_error", code="permission_denied")


def _has_no_transport(protocol: asyncio.Protocol) -> bool:
    """Returns whether a connection has not begun yet, or has ended."""
    return getattr(protocol, "transport", None) is None


class _Refusal(asyncio.Protocol):
    """Closes a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop are no instances of asyncio.Transport.
        cast("asyncio.Transport", transport).abort()


def _known_path(request: web.Request) -> str:
    """Returns the path of a request without a route if other methods have one; else "unknown": clients invent paths."""
    known = {resource.canonical for resource in request.app.router.resources()}
    return request.path if request.path in known else "unknown"


def _error_response(error: ApiError, path: str) -> web.Response:
    body = anthropic_error(error) if f"{path}/".startswith(f"{MESSAGES}/") else error.body
    return web.json_response(body, status=error.status, headers=error.headers)
