"""The endpoints that generate no text: models, tokens, health, version and metrics."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateway.api import anthropic
from gateway.api.errors import from_quire_error, unavailable
from gateway.api.models import model_list
from gateway.api.tokens import NAMES, parse_detokenize, parse_tokenize, tokenized, tokenizer_info
from gateway.http.generation import authorization_of
from gateway.metrics import CONTENT_TYPE
from quire.errors import QuireError
from quire.v1 import tokenization_pb2
from quire.version import build_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.api.errors import ApiError
    from gateway.http.served_models import ServedModels
    from gateway.metrics import GatewayMetrics
    from gateway.schedulers.open_requests import OpenRequests
    from gateway.schedulers.schedulers import Schedulers
    from quire.http.json_bodies import JsonBodies

_MAX_KNOWN = 64
"""Callers that may read the metrics while no scheduler answers."""

METRICS_TIMEOUT_S = 1.0
"""Time in which a scheduler has to say whether a client may read the metrics: Prometheus does not wait for long."""


class Pages:
    """Calls a scheduler on behalf of the client, so that its credentials decide.

    shows_strangers  a client without credentials may read the metrics until a scheduler refuses it
    """

    def __init__(
        self,
        schedulers: Schedulers,
        models: ServedModels,
        bodies: JsonBodies,
        metrics: GatewayMetrics,
        requests: OpenRequests,
        *,
        shows_strangers: bool,
    ) -> None:
        self._schedulers = schedulers
        self._models = models
        self._bodies = bodies
        self._metrics = metrics
        self._requests = requests
        self._known: dict[bytes, None] = {}  # digests of credentials, the oldest first
        if shows_strangers:
            self._known[_digest("")] = None

    async def list_models(self, request: web.Request) -> web.Response:
        try:
            cards = await self._models.cards(authorization_of(request))
        except QuireError as error:
            raise from_quire_error(error, {}) from None
        return web.json_response(model_list(cards))

    async def show_model(self, request: web.Request) -> web.Response:
        try:
            card = await self._models.card(request.match_info["model"], authorization_of(request))
        except QuireError as error:
            raise from_quire_error(error, {}) from None
        return web.json_response(card)

    async def tokenize(self, request: web.Request) -> web.Response:
        model, wanted = await self._bodies.read(request, parse_tokenize)
        response = await self._tokenization(request, model, "Tokenize", wanted)
        return web.json_response(tokenized(response, has_strings=wanted.return_bytes))

    async def count_tokens(self, request: web.Request) -> web.Response:
        model, wanted = await self._bodies.read(request, anthropic.parse_count)
        response = await self._tokenization(request, model, "Tokenize", wanted, anthropic.NAMES)
        return web.json_response(anthropic.token_count(response))

    async def detokenize(self, request: web.Request) -> web.Response:
        model, wanted = await self._bodies.read(request, parse_detokenize)
        response = await self._tokenization(request, model, "Detokenize", wanted)
        return web.json_response({"prompt": response.text})

    async def show_tokenizer(self, request: web.Request) -> web.Response:
        wanted = tokenization_pb2.GetTokenizerInfoRequest()
        response = await self._tokenization(request, "", "GetTokenizerInfo", wanted)
        info = self._schedulers.info
        return web.json_response(tokenizer_info(response, 0 if info is None else info.max_model_len))

    async def show_health(self, request: web.Request) -> web.Response:
        """Answers 200 if a request would be served now. Needs no identity."""
        if self._requests.is_draining:
            return web.Response(status=503, text="draining\n")
        is_ready = self._schedulers.is_ready
        return web.Response(status=200 if is_ready else 503, text="ok\n" if is_ready else "no scheduler is ready\n")

    async def show_liveness(self, request: web.Request) -> web.Response:
        """Answers 200 while this process runs. Needs no identity."""
        return web.Response(text="ok\n")

    async def show_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": build_version()})

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Shows the metrics to a client that a scheduler knows, or knew when it last answered.

        The scheduler is asked for what it can tell before its executor has loaded the model.
        """
        authorization = authorization_of(request)
        caller = _digest(authorization)
        failure: ApiError | None = None
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                await self._schedulers.tokenization(
                    "GetTokenizerInfo", tokenization_pb2.GetTokenizerInfoRequest(), authorization
                )
        except TimeoutError:
            failure = unavailable("no scheduler has answered in time")
        except QuireError as error:
            failure = from_quire_error(error, {})
        if failure is None:
            self._known[caller] = None
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        elif failure.status in (401, 403):
            self._known.pop(caller, None)
        if failure is not None and caller not in self._known:
            raise failure
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _tokenization(
        self, request: web.Request, model: str, method: str, wanted: Any, names: Mapping[str, str] = NAMES
    ) -> Any:
        authorization = authorization_of(request)
        try:
            await self._models.checked(model, authorization)
            return await self._schedulers.tokenization(method, wanted, authorization)
        except QuireError as error:
            raise from_quire_error(error, names) from None


def _digest(authorization: str) -> bytes:
    return blake2b(authorization.encode(), digest_size=16).digest()
