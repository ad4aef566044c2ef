"""Bounds how many requests are received at a time, so that their messages take little memory.

A message may have 4 MiB, and gRPC holds what has arrived of it until it is complete. With 256 streams on each of many
connections, a client would fill the memory with messages that it never completes::

    calls     │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │ │      a waiting call takes 64 KiB: gRPC receives no more of it
    received  ████ ████ ████ ████ ████                 MAX_READS at once

The next call is one of the tenant with the fewest that are received, and of its connections the one with the fewest.
A call whose message is late ends, after a shorter time if others wait for its place.

A message of 4 MiB takes 5 ms to parse, during which the event loop cannot run. So large messages are parsed one after
the other, with a pause after each.

grpc.aio 1.85 frees a message only if its read is awaited to the end (https://github.com/grpc/grpc/issues/43360).
So a read is never cancelled. It is a task of its own, which ends with its call.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio

from scheduler.core import QueueFull
from scheduler.requests.status import DeadlineExceeded
from scheduler.telemetry.limits import REQUEST_READS, STALLED_READERS, limited
from scheduler.text.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    Context = grpc.aio.ServicerContext[Any, Any]
    Key = tuple[str, str]  # a tenant, and one of its connections
    Receive = Callable[[], Awaitable[Any]]  # returns the bytes of a message, or EOF
    Parse = Callable[[bytes], Any]

MAX_READS = 32
"""Most requests that are received at once: 128 MiB, if each has the most bytes."""

MAX_READS_OF_A_TENANT = 24
"""Other tenants do not wait for the messages of one tenant."""

MAX_WAITING = 1024
"""Most calls of a tenant that wait until their request is received: 64 MiB."""

MAX_STREAMS = 64
"""Most calls of a tenant whose requests are a stream. Such a call receives a message at any time: 256 MiB in all. As
many calls of `_WATCH` may be open."""

MAX_ANSWER_BYTES = 64 << 20
"""Most bytes of answers of a tenant that their clients have not accepted yet. Streams have bounds of their own."""

_CALL_BYTES = 18 << 10
"""Memory of a call with a small message."""

TIMEOUT_S = 10.0
"""Time that a request has to arrive."""

GIVE_WAY_S = 2.0
"""The same while other calls wait."""

LARGE_BYTES = 1 << 16
"""A message of more bytes waits for its turn until it is parsed. Tenants take turns."""

_MAX_SHARE = 0.1
"""Share of the event loop's time in which large messages are parsed."""

_SWEEP_S = 0.02
"""While calls wait, one call whose request is late ends in each interval of this length."""


class _Read:
    """The place of a call, until its message has arrived or its call has ended."""

    def __init__(self, key: Key, began_s: float) -> None:
        self.key = key
        self.began_s = began_s
        self.message: asyncio.Future[Any] | None = None
        self.has_arrived = False
        self.is_late = False
        self.is_over = False  # the call has ended

    def end(self) -> None:
        """Ends a call whose message has not arrived."""
        if self.message is not None and not self.has_arrived:
            self.is_late = True
            self.message.cancel()


class RequestPlaces:
    """The requests that all servers of this process receive. Used from one event loop.

    max_reads              most requests that are received at once; None: MAX_READS
    max_reads_of_a_tenant  most of one tenant; None: MAX_READS_OF_A_TENANT
    """

    def __init__(
        self,
        max_reads: int | None = None,
        max_reads_of_a_tenant: int | None = None,
    ) -> None:
        self._max_reads = max_reads or MAX_READS
        self._max_reads_of_a_tenant = max_reads_of_a_tenant or MAX_READS_OF_A_TENANT
        self._reads: dict[_Read, None] = {}  # in the order in which they began
        self._num_reads: Counter[str | Key] = Counter()  # by tenant, and by connection
        self._num_waiting: Counter[str] = Counter()
        self._num_streams: Counter[str] = Counter()
        self._answer_bytes: Counter[str] = Counter()
        self._queues: dict[Key, deque[asyncio.Future[_Read]]] = {}  # no queue is empty
        self._sweeping: asyncio.TimerHandle | None = None
        no_limit = sys.maxsize
        self._parsing = Turns(1, large=no_limit, max_size=no_limit, max_size_of_a_tenant=no_limit)

    async def read(self, key: Key, receive: Receive, parse: Parse) -> Any:
        """Returns the message of a call, when it is its turn, or EOF. Raises QueueFull and DeadlineExceeded."""
        read = await self._begin(key)

        async def parsed() -> Any:
            data = await receive()
            read.has_arrived = True
            return grpc.aio.EOF if read.is_over else await self.parsed(key[0], data, parse)

        task = begin_read(parsed)
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
            read.is_over = True
            late.cancel()

    async def parsed(self, tenant: str, data: Any, parse: Parse) -> Any:
        """Returns the message, or EOF if `data` is EOF. A large one waits for its turn."""
        if data is grpc.aio.EOF or len(data) <= LARGE_BYTES:
            return data if data is grpc.aio.EOF else parse(data)
        turn = await self._parsing.take(tenant, len(data))
        began_s = time.monotonic()
        try:
            return parse(data)
        finally:
            pause_s = (1 / _MAX_SHARE - 1) * (time.monotonic() - began_s)
            asyncio.get_running_loop().call_later(pause_s, turn.end)

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

    @contextmanager
    def answer(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Counts an answer until its client has accepted it. Raises QueueFull."""
        num_bytes = max(num_bytes, _CALL_BYTES)
        if self._answer_bytes[tenant] + num_bytes > MAX_ANSWER_BYTES:
            limited(STALLED_READERS)
            raise QueueFull("too many answers wait until their clients accept them")
        _add(self._answer_bytes, tenant, num_bytes)
        try:
            yield
        finally:
            _add(self._answer_bytes, tenant, -num_bytes)

    async def _begin(self, key: Key) -> _Read:
        """Waits for a place. Raises QueueFull if too many calls of the tenant wait."""
        tenant = key[0]
        if not self._queues and self._has_place(tenant):
            return self._enter(key)
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
        while keys := [key for key in self._queues if self._has_place(key[0])]:
            key = min(keys, key=self._load)
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
        late_s = time.monotonic() - GIVE_WAY_S
        late = [read for read in self._reads if read.began_s <= late_s and not (read.has_arrived or read.is_late)]
        if late:
            heaviest = max(late, key=lambda read: self._load(read.key))  # the oldest of equal ones
            if self._num_reads[heaviest.key[0]] >= least:
                heaviest.end()

    def _has_place(self, tenant: str) -> bool:
        return len(self._reads) < self._max_reads and self._num_reads[tenant] < self._max_reads_of_a_tenant

    def _load(self, key: Key) -> tuple[int, int]:
        return self._num_reads[key[0]], self._num_reads[key]

    def _enter(self, key: Key) -> _Read:
        read = _Read(key, time.monotonic())
        self._reads[read] = None
        _add(self._num_reads, key[0], 1)
        _add(self._num_reads, key, 1)
        return read

    def _leave(self, read: _Read) -> None:
        del self._reads[read]
        _add(self._num_reads, read.key[0], -1)
        _add(self._num_reads, read.key, -1)
        self._serve()


_running: set[asyncio.Task[Any]] = set()
"""The event loop itself holds tasks weakly."""


def begin_read(read: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    """Starts a read that its caller may leave, but never cancels."""

    async def run() -> Any:
        return await read()

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def _add(counts: Counter[Any], key: object, number: int) -> None:
    """Adds to a count, and forgets it at zero."""
    counts[key] += number
    if not counts[key]:
        del counts[key]
