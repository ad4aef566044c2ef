"""Decides which gRPC calls the gateway takes, and names their callers.

A scheduler verifies the credentials of each call and decides what its caller may do. This table only says which calls
are passed on; every other call is refused, also if a library adds its method to the server.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from gateway.schedulers.stream import Caller, trace_header
from quire.errors import UnauthenticatedError
from quire.logs import printable
from scheduler.identity.identity import CALLER, Identity

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    Context = grpc.aio.ServicerContext[Any, Any]

METHODS = frozenset(
    {
        "/quire.v1.Generation/Generate",
        "/quire.v1.Generation/GetServerInfo",
        "/quire.v1.Tokenization/Tokenize",
        "/quire.v1.Tokenization/Detokenize",
        "/quire.v1.Tokenization/GetTokenizerInfo",
        # These need no identity: they tell nothing but a state.
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }
)
"""The calls that are taken. Admin calls are none of them: an operator makes them at the address of one scheduler."""

MAX_ADDRESS = 256


class TakenCalls(grpc.aio.ServerInterceptor):
    """Refuses each call that is not in `METHODS`, before its request is read."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        if handler_call_details.method in METHODS:
            return await continuation(handler_call_details)

        async def refuse(_: object, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this gateway does not offer the method")

        # A handler of a stream is called before the first message has arrived. Clients cannot tell the difference.
        return grpc.stream_stream_rpc_method_handler(refuse)


@contextmanager
def calling(context: Context) -> Iterator[Caller]:
    """Yields the client of a call while it is served.

    Calls that a client cancels at once are counted for its network address (`scheduler.servers.reset_calls`), except
    for clients that a scheduler does not know: all of these count together.
    """
    peer = context.peer() or ""
    token = CALLER.set(Identity("client", _host(peer), frozenset()))
    try:
        yield caller_of(context, peer)
    except UnauthenticatedError:
        CALLER.reset(token)
        raise


def caller_of(context: Context, peer: str) -> Caller:
    """Returns the client of a call. Its credentials are passed on; a scheduler verifies them."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    remaining_s: float | None = context.time_remaining()
    return Caller(
        authorization=metadata.get("authorization", ""),
        address=printable(peer)[:MAX_ADDRESS],
        traceparent=trace_header(metadata.get("traceparent", ""), 256),
        tracestate=trace_header(metadata.get("tracestate", ""), 512),
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )


def _host(peer: str) -> str:
    """Returns the address of a peer such as "ipv4:127.0.0.1:5000", without the port."""
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]
