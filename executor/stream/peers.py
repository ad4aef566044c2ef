"""Checks the callers of the executor over TLS: only the scheduler with the right name in its certificate is served.

Health checks need a certificate of the same authorities, with any name.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from quire.tls import peer_names

_HEALTH = "/grpc.health.v1.Health/"

Context = grpc.aio.ServicerContext[Any, Any]


class PeerCheck(grpc.aio.ServerInterceptor):
    """Refuses every call, except to the health service, of a peer whose certificate lacks the scheduler's name."""

    def __init__(self, scheduler_name: str) -> None:
        self._scheduler_name = scheduler_name

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler of the call, behind the check. grpc.aio gives handlers no useful types."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH):
            return handler
        codec = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._checked_stream(handler.stream_stream), *codec)
        return grpc.unary_unary_rpc_method_handler(self._checked(handler.unary_unary), *codec)

    async def _check(self, context: Context) -> None:
        names = peer_names(context.auth_context())
        if self._scheduler_name not in names:
            found = ", ".join(map(repr, names)) or "no name"
            message = f"this executor serves {self._scheduler_name!r} only; the certificate of this call has {found}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)

    def _checked(self, behaviour: Any) -> Any:
        async def checked(request: Any, context: Context) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        return checked

    def _checked_stream(self, behaviour: Any) -> Any:
        async def checked(requests: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(context)
            async for response in behaviour(requests, context):
                yield response

        return checked
