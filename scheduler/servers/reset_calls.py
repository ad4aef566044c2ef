"""Bounds the rate of calls that cost the event loop a turn and bring nothing: those that their clients cancel at once.

HTTP/2 lets a client open a stream and cancel it in one packet, ten thousand times a second (CVE-2023-44487). Each
stream becomes a call, which takes 0.2 ms of the event loop, and other clients' calls and the executor's results wait.

gRPC counts a stream as open until its handler has ended, also if it was cancelled. So the handler of a cancelled call
*lingers* until its tenant may end another one. The streams of the attacker's connections are then soon used up, and
gRPC refuses more of them in its own threads, without a call::

    cancelled  │ │ │ │ │ │ │ │ │ │ │ │ │ │
    ended      │ │ │ │     │     │     │          BURST at once, then RATE_PER_S of each tenant

Calls that are refused because their caller is unknown linger as well. The status is sent before that.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from scheduler.identity.identity import CALLER
from scheduler.telemetry.limits import RESET_CALLS, limited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Context = grpc.aio.ServicerContext[Any, Any]

RATE_PER_S = 50
BURST = 100
MAX_LINGER_S = 30.0
"""A call is never kept longer than this, so that the number of calls that are kept is bounded."""

AT_ONCE_S = 1.0
"""A client that has sent its request and cancels after more than this has waited for it: its call does not linger."""

DEADLINE_S = 0.1
"""A call that is cancelled with less than this left until its deadline has expired, by the clock of its client."""

_MAX_TENANTS = 4096
"""Beyond this number, tenants without a call that lingers are forgotten."""


class ResetCalls(grpc.aio.ServerInterceptor):
    """Lets calls linger that were cancelled at once, or refused to a stranger. It has to be the first interceptor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_s: dict[str, float] = {}  # when the last call of a tenant has paid for its end
        self._closing = asyncio.Event()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler

        async def serve(messages: Any, context: Context) -> None:
            call = _Call(handler, context, self._clock)
            try:
                await call.serve(messages)
            except asyncio.CancelledError:
                if call.has_brought_nothing:
                    await self._linger()
                raise
            except grpc.aio.AbortError:
                if CALLER.get(None) is None:
                    await self._linger()
                raise

        # The handler of a stream is called before the first message has arrived, which may never come.
        return grpc.stream_stream_rpc_method_handler(
            serve, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def close(self) -> None:
        """Ends all calls that linger, and lets no more do so."""
        self._closing.set()

    def linger_s(self, tenant: str) -> float:
        """Counts a call of a tenant, and returns how long it has to linger, in seconds."""
        now_s = self._clock()
        if len(self._free_s) > _MAX_TENANTS:
            self._free_s = {each: free_s for each, free_s in self._free_s.items() if free_s > now_s}
        free_s = self._free_s[tenant] = max(now_s, self._free_s.get(tenant, now_s)) + 1 / RATE_PER_S
        return min(max(0.0, free_s - now_s - BURST / RATE_PER_S), MAX_LINGER_S)

    async def _linger(self) -> None:
        caller = CALLER.get(None)
        linger_s = self.linger_s("" if caller is None else caller.tenant)
        if linger_s and not self._closing.is_set():
            limited(RESET_CALLS)
            try:
                async with asyncio.timeout(linger_s):
                    await self._closing.wait()
            except TimeoutError:
                pass


class _Call:
    """A call of any kind, which is served as the call of a stream of requests."""

    def __init__(self, handler: Any, context: Context, clock: Callable[[], float]) -> None:
        self._handler = handler
        self._context = context
        self._clock = clock
        self._began_s: float | None = None  # when its request had arrived

    async def serve(self, messages: Any) -> None:
        handler, context = self._handler, self._context
        if handler.request_streaming:
            await handler.stream_stream(messages, context)
            return
        request: Any = await context.read()
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        self._began_s = self._clock()
        if handler.response_streaming:
            await handler.unary_stream(request, context)
        else:
            await context.write(await handler.unary_unary(request, context))

    @property
    def has_brought_nothing(self) -> bool:
        """True if the call was cancelled at once: before its request came, or soon after it and not by a deadline."""
        if self._began_s is None:
            return True
        left_s = self._context.time_remaining()
        return self._clock() - self._began_s < AT_ONCE_S and (left_s is None or left_s > DEADLINE_S)
