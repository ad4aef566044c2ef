"""Bounds how many requests are received at a time, so that their messages take little memory.

A message may have 4 MiB, and gRPC holds what has arrived of it until it is complete. With 256 streams on each of many
connections, a client would fill the memory with messages that it never completes::

    calls     │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │      a waiting call takes 64 KiB: gRPC receives no more of it
    received  ████ ████ ████ ████ ████                 MAX_READS at once

The next call is one of the tenant with the fewest that are received, and of its connections the one with the fewest.
A call whose message is late ends, after a shorter time if others wait for its place.

grpc.aio frees a message only when somebody awaits it (https://github.com/grpc/grpc/issues/43360, true of 1.85). So a
read is never cancelled. It is a task of its own, which ends with its call.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc.aio

from quire.garbage import drop_frames
from scheduler.core import QueueFull, QuireError
from scheduler.identity.identity import CALLER
from scheduler.requests.status import DeadlineExceeded, abort
from scheduler.telemetry.limits import REQUEST_READS, limited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    Context = grpc.aio.ServicerContext[Any, Any]
    Key = tuple[str, str]  # a tenant, and one of its connections

MAX_READS = 32
"""Most requests that are received at once: 128 MiB, if each has the most bytes."""

MAX_WAITING = 1024
"""Most calls of a tenant that wait until their request is received: 64 MiB."""

MAX_STREAMS = 64
"""Most calls of a tenant whose requests are a stream. Such a call receives a message at any time: 256 MiB in all. As
many calls of `_WATCH` may be open."""

_WATCH = "/grpc.health.v1.Health/Watch"
"""Callers without credentials may make this call, and it never ends."""

TIMEOUT_S = 10.0
"""Time that a request has to arrive."""

GIVE_WAY_S = 2.0
"""The same while other calls wait."""

_SWEEP_S = 0.02
"""While calls wait, one call whose request is late ends in each interval of this length."""

ARRIVED_S: ContextVar[float] = ContextVar("arrived_s")
"""When the request of this call had arrived, on time.monotonic()."""


class _Read:
    """The place of a call, until its message has arrived or its call has ended."""

    def __init__(self, key: Key, began_s: float) -> None:
        self.key = key
        self.began_s = began_s
        self.message: asyncio.Future[Any] | None = None
        self.is_late = False

    def end(self) -> None:
        self.is_late = True
        if self.message is not None:
            self.message.cancel()


class RequestReads:
    """The requests that all servers of this process receive. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reads: dict[_Read, None] = {}  # in the order in which they began
        self._num_reads: Counter[str | Key] = Counter()  # by tenant, and by connection
        self._num_waiting: Counter[str] = Counter()
        self._num_streams: Counter[str] = Counter()
        self._queues: dict[Key, deque[asyncio.Future[_Read]]] = {}  # no queue is empty
        self._sweeping: asyncio.TimerHandle | None = None

    async def read(self, tenant: str, connection: str, receive: Callable[[], Awaitable[Any]]) -> Any:
        """Returns what `receive` returns, when it is this call's turn. Raises QueueFull and DeadlineExceeded."""
        read = await self._begin((tenant, connection))
        task = _begin(receive)
        # The place is kept until the message is freed, also if this call is cancelled before.
        task.add_done_callback(lambda _: self._leave(read))
        read.message = asyncio.shield(task)
        late = asyncio.get_running_loop().call_later(TIMEOUT_S, read.end)
        try:
            return await read.message
        except asyncio.CancelledError:
            if not read.is_late:
                raise
            limited(REQUEST_READS)
            raise DeadlineExceeded("the request did not arrive in time") from None
        finally:
            late.cancel()

    @contextmanager
    def stream(self, tenant: str) -> Iterator[None]:
        """Counts a call whose requests are a stream. Raises QueueFull."""
        if self._num_streams[tenant] >= MAX_STREAMS:
            limited(REQUEST_READS)
            raise QueueFull(f"{MAX_STREAMS} calls of streams of requests are open")
        _add(self._num_streams, tenant, 1)
        try:
            yield
        finally:
            _add(self._num_streams, tenant, -1)

    async def _begin(self, key: Key) -> _Read:
        """Waits for a place. Raises QueueFull if too many calls of the tenant wait."""
        if len(self._reads) < MAX_READS and not self._queues:
            return self._enter(key)
        tenant = key[0]
        if self._num_waiting[tenant] >= MAX_WAITING:
            limited(REQUEST_READS)
            raise QueueFull(f"{MAX_WAITING} calls wait until their requests are received")
        place: asyncio.Future[_Read] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(place)
        _add(self._num_waiting, tenant, 1)
        self._serve()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the place was given in the same iteration of the loop
                self._leave(place.result())
            raise
        finally:
            _add(self._num_waiting, tenant, -1)

    def _serve(self) -> None:
        """Gives free places to waiting calls."""
        while self._queues and len(self._reads) < MAX_READS:
            key = min(self._queues, key=self._load)
            queue = self._queues.pop(key)
            place = queue.popleft()
            if queue:
                self._queues[key] = queue  # behind others with the same load
            if not place.done():  # its call was not cancelled
                place.set_result(self._enter(key))
        if self._queues and self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Ends a late call of the tenant that receives the most, unless only tenants that receive more wait."""
        self._sweeping = None
        self._serve()
        if not self._queues:
            return
        least, _ = min(map(self._load, self._queues))
        late_s = self._clock() - GIVE_WAY_S
        late = [read for read in self._reads if read.began_s <= late_s and not read.is_late]
        if late:
            heaviest = max(late, key=lambda read: self._load(read.key))  # the oldest of equal ones
            if self._num_reads[heaviest.key[0]] >= least:
                heaviest.end()

    def _load(self, key: Key) -> tuple[int, int]:
        return self._num_reads[key[0]], self._num_reads[key]

    def _enter(self, key: Key) -> _Read:
        read = _Read(key, self._clock())
        self._reads[read] = None
        _add(self._num_reads, key[0], 1)
        _add(self._num_reads, key, 1)
        return read

    def _leave(self, read: _Read) -> None:
        del self._reads[read]
        _add(self._num_reads, read.key[0], -1)
        _add(self._num_reads, read.key, -1)
        self._serve()


class ReadRequests(grpc.aio.ServerInterceptor):
    """Serves each call as one of a stream of requests, and reads its request when it is its turn.

    It has to come after the interceptors that decide about access. The handler of a stream is called before the first
    message has arrived; clients cannot tell the difference.
    """

    def __init__(self, reads: RequestReads) -> None:
        self._reads = reads

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler

        is_counted = handler.request_streaming or handler_call_details.method == _WATCH

        async def serve(_: object, context: Context) -> None:
            peer = context.peer() or ""
            try:
                with self._reads.stream(_tenant(peer)) if is_counted else nullcontext():
                    if handler.request_streaming:
                        await _respond(handler.stream_stream(_messages(context), context), context)
                    else:
                        await self._serve_one(handler, peer, context)
            except QuireError as error:
                await abort(context, error)
            except grpc.aio.AbortError as error:
                drop_frames(error)  # gRPC keeps the error with the call, which the frames refer to
                raise

        return grpc.stream_stream_rpc_method_handler(
            serve, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    async def _serve_one(self, handler: Any, peer: str, context: Context) -> None:
        request = await self._reads.read(_tenant(peer), peer, context.read)
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        ARRIVED_S.set(time.monotonic())
        if handler.response_streaming:
            await _respond(handler.unary_stream(request, context), context)
        else:
            await context.write(await handler.unary_unary(request, context))


async def _respond(responses: Any, context: Context) -> None:
    """Runs the handler of a stream of responses, which writes them itself or yields them."""
    if inspect.isasyncgen(responses):
        async for response in responses:
            await context.write(response)
    else:
        await responses


async def _messages(context: Context) -> AsyncIterator[Any]:
    """Yields the requests of a stream."""
    while (message := await asyncio.shield(_begin(context.read))) is not grpc.aio.EOF:
        yield message


_running: set[asyncio.Task[Any]] = set()
"""The event loop itself holds tasks weakly."""


def _begin(receive: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    """Starts a read that its caller may leave, but never cancels."""

    async def run() -> Any:
        return await receive()

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def _tenant(peer: str) -> str:
    """Returns the tenant of the caller, or the network address of one that is not known."""
    caller = CALLER.get(None)
    if caller is not None:
        return caller.tenant
    return peer if peer.startswith("unix:") else f"address {peer.rpartition(':')[0]}"


def _add(counts: Counter[Any], key: object, number: int) -> None:
    """Adds to a count, and forgets it at zero."""
    counts[key] += number
    if not counts[key]:
        del counts[key]
