"""The messages of one request. The stream continues by itself after its scheduler has died.

A scheduler that refuses a request because of its own state, because it is full or draining, is passed over: the request
goes to the others that are ready, once to each, before its client gets an error. A stream that was begun
with another model or other defaults than this scheduler's goes to the others, too. Refusals that concern the request or
a limit of its tenant are final, and so are all others after the first message.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.schedulers.shared_call import StreamMoved
from quire.errors import OtherModelError, QueueFullError, QuireError, UnavailableError
from quire.status import is_lost_connection
from quire.tries import ServerContact, Tries
from quire.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from gateway.schedulers.route import Route
    from gateway.schedulers.scheduler import Scheduler

MAX_UNREAD = 32
"""The scheduler is asked to pause a stream when this many of its messages wait for a slow reader."""

_MAX_TIMEOUT_MS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request.

    authorization  its `Authorization` header; empty if it has sent none
    address        its network address, for logs
    traceparent, tracestate   headers of W3C Trace Context
    deadline_s     time of time.monotonic() at which its requests end; None: never
    """

    authorization: str = ""
    address: str = ""
    traceparent: str = ""
    tracestate: str = ""
    deadline_s: float | None = None

    def timeout_s(self) -> float | None:
        """Returns the time that is left; None: there is no deadline."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())


def trace_header(text: str, max_length: int) -> str:
    """Returns a header of W3C Trace Context; an empty one, as if there were none, if it is longer or not ASCII.

    The beginning of a longer one could be read as other values.
    """
    return text if len(text) <= max_length and text.isascii() else ""


class Taker(Protocol):
    """Takes messages as they arrive. Both methods are called on the event loop."""

    def is_free(self) -> bool:
        """Returns whether it can take a message now."""

    def take(self, message: pb.GenerateResponse) -> None:
        """Takes a message. What it raises, `GenerationStream.next` raises."""


class GenerationStream:
    """Sends the request at once. `next` returns the messages; `close` cancels the request unless it has ended."""

    def __init__(self, route: Route, request: pb.GenerateRequest, caller: Caller, contact: ServerContact) -> None:
        self._route = route
        self._request = request
        self._caller = caller
        self._tries = Tries(request, {"timeout": caller.timeout_s(), "wait_for_ready": False}, contact)
        self._unread: list[pb.GenerateResponse] = []
        self._reading: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._failure: Exception | None = None  # of the taker
        self._is_paused = False
        self._is_open = False
        self._error: QuireError | None = None
        self._has_begun = False  # a message has arrived
        self._has_place = False  # a message of this try has arrived
        self._refusals: list[QuireError] = []  # since the last pause
        self._begin(route.first())

    async def next(self) -> list[pb.GenerateResponse] | None:
        """Returns the messages that have arrived, at least one; None after the last one. Raises a QuireError."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._unread:
                unread, self._unread = self._unread, []
                if self._is_paused:
                    self._is_paused = False
                    self._call.proceed(self._stream_id)
                accept = self._tries.accept
                if news := [message for message in unread if accept(message)]:
                    return news
            elif self._is_open:
                self._reading = asyncio.get_running_loop().create_future()
                await self._reading
            elif self._error is None:
                return None
            elif isinstance(self._error, StreamMoved):
                self._tries.moved(self._error)
                self._refusals.clear()
                self._begin(self._route.next(has_moved=True) or self._route.first())
            elif (scheduler := self._other_scheduler(self._error)) is not None:
                self._begin(scheduler)
            elif isinstance(full := self._final_error(self._error), QueueFullError) and self._may_wait(full):
                await self._route.wait(full)
                self._refusals.clear()
                self._begin(self._route.first())
            else:
                pause_s = self._tries.pause_s(full)
                is_full = isinstance(full, QueueFullError) and not full.is_of_tenant
                await (self._route.pause(pause_s) if is_full else asyncio.sleep(pause_s))
                while pause_s and _is_draining(full) and not self._route.is_any_ready:  # another try would be refused
                    pause_s = self._tries.pause_s(full)
                    await asyncio.sleep(pause_s)
                self._refusals.clear()
                self._begin(self._route.first())

    def deliver_to(self, taker: Taker) -> None:
        """From now on, a message that arrives while `next` waits goes to `taker` if that is free: to wake a task for
        each message costs more than the message."""
        self._taker = taker

    @property
    def can_move(self) -> bool:
        return self._tries.can_continue

    @property
    def is_suspect(self) -> bool:
        return self._tries.has_moved

    def close(self) -> None:
        """Cancels the request unless it has ended. May be called more than once."""
        if self._is_open:
            self._is_open = False
            self._route.left(frees_room=True)
            self._call.cancel(self._stream_id)

    def received(self, response: pb.GenerateResponse) -> None:
        self._has_begun = self._has_place = True
        self._route.received(response)
        # While `next` waits, all earlier messages were processed.
        taker, reading = self._taker, self._reading
        if taker is not None and reading is not None and not reading.done() and taker.is_free():
            self._take(taker, response)
            return
        self._unread.append(response)
        if len(self._unread) >= MAX_UNREAD and not self._is_paused:
            self._is_paused = True
            self._call.pause(self._stream_id)
        self._wake()

    def ended(self, error: QuireError | None) -> None:
        self._is_open = self._is_paused = False
        self._route.left(frees_room=self._has_place and not isinstance(error, StreamMoved))
        self._error = error
        self._wake()

    def _take(self, taker: Taker, response: pb.GenerateResponse) -> None:
        try:
            if self._tries.accept(response):
                taker.take(response)
        except Exception as error:  # noqa: BLE001  (`next` raises it in the task of the request)
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def _other_scheduler(self, error: QuireError) -> Scheduler | None:
        """Returns the next scheduler for a request that was refused; None if it is not to be sent to another one."""
        if isinstance(error, OtherModelError):
            return self._route.next()
        if self._has_begun or not _is_of_scheduler(error):
            return None
        self._refusals.append(error)
        return self._route.next()

    def _may_wait(self, error: QueueFullError) -> bool:
        """Returns whether a request that all schedulers have refused waits for room."""
        return self._route.can_wait and not self._has_begun and not error.is_of_tenant

    def _final_error(self, error: QuireError) -> QuireError:
        """Returns the error for the client: of several refusals that of the queue that has room first."""
        full = [each for each in self._refusals if isinstance(each, QueueFullError)]
        return min(full, key=lambda each: each.retry_after_s) if full and _is_of_scheduler(error) else error

    def _begin(self, scheduler: Scheduler) -> None:
        try:
            self._call = scheduler.call
            self._stream_id = self._call.open(self._opening(), self)
        except BaseException:
            self._route.not_sent()
            raise
        self._is_open = True
        self._has_place = False
        self._error = None

    def _opening(self) -> pb.OpenStream:
        """Raises DeadlineExceededError."""
        request, _ = self._tries.next_call()
        caller = self._caller
        timeout_s = caller.timeout_s()
        return pb.OpenStream(
            request=request,
            authorization=caller.authorization,
            client=caller.address,
            traceparent=caller.traceparent,
            tracestate=caller.tracestate,
            timeout_ms=None if timeout_s is None else min(int(timeout_s * 1e3), _MAX_TIMEOUT_MS),
        )


def _is_of_scheduler(error: QuireError) -> bool:
    """Returns whether a refusal is due to the state of the scheduler, so that another one may accept the request.

    After a lost connection, the request may be what has ended the scheduler: the rules of breaks bound its tries.
    """
    return _is_draining(error) or (isinstance(error, QueueFullError) and not error.is_of_tenant)


def _is_draining(error: QuireError) -> bool:
    """Returns whether a scheduler has answered that it serves no requests."""
    return isinstance(error, UnavailableError) and not is_lost_connection(error)
