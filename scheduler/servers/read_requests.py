"""Reads the requests of all calls, when it is their turn (`request_places.py`)."""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc.aio

from quire.garbage import drop_frames
from scheduler.core import QuireError
from scheduler.identity.identity import CALLER
from scheduler.requests.status import abort
from scheduler.requests.write_timeout import WriteTimeout
from scheduler.servers.request_places import begin_read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from scheduler.servers.request_places import Parse, RequestPlaces

    Context = grpc.aio.ServicerContext[Any, Any]

_WATCH = "/grpc.health.v1.Health/Watch"
"""Callers without credentials may make this call, and it never ends."""

ARRIVED_S: ContextVar[float] = ContextVar("arrived_s")
"""When the request of this call had arrived, or a stream of requests had begun, on time.monotonic()."""


class ReadRequests(grpc.aio.ServerInterceptor):
    """Serves each call as one of a stream of requests, and reads its request when it is its turn.

    It has to come after the interceptors that decide about access. The handler of a stream is called before the first
    message has arrived; clients cannot tell the difference.
    """

    def __init__(
        self, places: RequestPlaces, stalled_reader_timeout_s: float, of_unknown: RequestPlaces | None = None
    ) -> None:
        """Takes the places of the requests, and those of callers that are not known; None: they are the same.

        stalled_reader_timeout_s  time after which a call ends whose client does not accept its only answer
        """
        self._known = places
        self._unknown = of_unknown or places
        self._reader_timeout_s = stalled_reader_timeout_s

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler

        is_counted = handler.request_streaming or handler_call_details.method == _WATCH

        async def serve(_: object, context: Context) -> None:
            peer = context.peer() or ""
            places = self._unknown if CALLER.get(None) is None else self._known
            try:
                with places.stream(_tenant(peer)) if is_counted else nullcontext():
                    if handler.request_streaming:
                        ARRIVED_S.set(time.monotonic())
                        messages = _messages(places, handler.request_deserializer, _tenant(peer), context)
                        await _respond(handler.stream_stream(messages, context), context)
                    else:
                        await self._serve_one(places, handler, peer, context)
            except QuireError as error:
                await abort(context, error)
            except grpc.aio.AbortError as error:
                drop_frames(error)  # gRPC keeps the error with the call, which the frames refer to
                raise

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    async def _serve_one(self, places: RequestPlaces, handler: Any, peer: str, context: Context) -> None:
        request = await places.read((_tenant(peer), peer), context.read, handler.request_deserializer)
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        ARRIVED_S.set(time.monotonic())
        if handler.response_streaming:
            await _respond(handler.unary_stream(request, context), context)
        else:
            answer = await handler.unary_unary(request, context)
            del request  # the client may take its time to accept the answer
            with (
                places.answer(_tenant(peer), answer.ByteSize()),
                WriteTimeout(self._reader_timeout_s) as timeout,
            ):
                timeout.begin_write()
                await context.write(answer)


async def _messages(places: RequestPlaces, parse: Parse, tenant: str, context: Context) -> AsyncIterator[Any]:
    """Yields the requests of a stream."""
    while (data := await asyncio.shield(begin_read(context.read))) is not grpc.aio.EOF:
        yield await places.parsed(tenant, data, parse)


async def _respond(responses: Any, context: Context) -> None:
    """Runs the handler of a stream of responses, which writes them itself or yields them."""
    if inspect.isasyncgen(responses):
        async for response in responses:
            await context.write(response)
    else:
        await responses


def _tenant(peer: str) -> str:
    """Returns the tenant of the caller, or the network address of one that is not known."""
    caller = CALLER.get(None)
    if caller is not None:
        return caller.tenant
    return peer if peer.startswith("unix:") else f"address {peer.rpartition(':')[0]}"
