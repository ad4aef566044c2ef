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

from quire.garbage import drop_frames
from scheduler.identity.identity import CALLER
from scheduler.servers.read_requests import ARRIVED_S
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
    """Lets calls linger that were cancelled at once, or refused to a stranger.

    It has to be the first interceptor, and serves calls that another one (`ReadRequests`) has made calls of streams.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_s: dict[str, float] = {}  # when the last call of a tenant has paid for its end
        self._closing = asyncio.Event()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not (handler.request_streaming and handler.response_streaming):
            return handler

        async def serve(messages: Any, context: Context) -> None:
            try:
                await handler.stream_stream(messages, context)
            except asyncio.CancelledError as error:
                drop_frames(error)  # they hold the request, which may be large
                if self._has_brought_nothing(context):
                    await self._linger()
                raise
            except grpc.aio.AbortError:
                if CALLER.get(None) is None:
                    await self._linger()
                raise

        return handler._replace(stream_stream=serve)

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

    def _has_brought_nothing(self, context: Context) -> bool:
        """True if the call was cancelled at once: before its request came, or soon after it and not by a deadline."""
        arrived_s = ARRIVED_S.get(None)
        if arrived_s is None:
            return True
        left_s = context.time_remaining()
        return self._clock() - arrived_s < AT_ONCE_S and (left_s is None or left_s > DEADLINE_S)

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
