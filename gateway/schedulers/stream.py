"""The messages of one request. The stream continues by itself after its scheduler has died.

A scheduler that refuses a request because of its own state, because it is full or draining, is passed over: the request
goes to the others that are ready, once to each, before its client gets an error. Refusals that concern the request or a
limit of its tenant are final, and so is every refusal after the first message.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.errors import QueueFullError, UnavailableError
from quire.status import is_lost_connection
from quire.tries import ServerContact, Tries
from quire.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Collection

    from gateway.schedulers.shared_call import Receiver
    from quire.errors import QuireError

MAX_UNREAD = 32
"""The scheduler is asked to pause a stream when this many of its messages wait for a slow reader."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request.

    authorization  its `Authorization` header; empty if it has sent none
    address        its network address, for logs
    traceparent, tracestate   headers of W3C Trace Context
    """

    authorization: str = ""
    address: str = ""
    traceparent: str = ""
    tracestate: str = ""


class Line(Protocol):
    """A place at which one stream can be opened: the call to one scheduler."""

    def open(self, opening: pb.OpenStream, receiver: Receiver) -> int: ...
    def pause(self, stream_id: int) -> None: ...
    def proceed(self, stream_id: int) -> None: ...
    def cancel(self, stream_id: int) -> None: ...


class Lines(Protocol):
    """Chooses the scheduler of a stream, again after each break, and another one after a refusal."""

    def choose(self, request: pb.GenerateRequest) -> Line: ...
    def other(self, request: pb.GenerateRequest, refused: Collection[Line]) -> Line | None: ...


class GenerationStream:
    """Sends the request at once. `next` returns the messages; `close` cancels the request unless it has ended."""

    def __init__(self, lines: Lines, request: pb.GenerateRequest, caller: Caller, contact: ServerContact) -> None:
        self._lines = lines
        self._request = request
        self._caller = caller
        self._tries = Tries(request, {"timeout": None, "wait_for_ready": False}, contact)
        self._unread: list[pb.GenerateResponse] = []
        self._reading: asyncio.Future[None] | None = None
        self._is_paused = False
        self._is_open = False
        self._error: QuireError | None = None
        self._has_begun = False  # a message has arrived
        self._refusals: list[tuple[Line, QuireError]] = []  # since the last pause
        self._begin(lines.choose(request))

    async def next(self) -> list[pb.GenerateResponse] | None:
        """Returns the messages that have arrived, at least one; None after the last one. Raises a QuireError."""
        while True:
            if self._unread:
                unread, self._unread = self._unread, []
                if self._is_paused:
                    self._is_paused = False
                    self._line.proceed(self._stream_id)
                accept = self._tries.accept
                if news := [message for message in unread if accept(message)]:
                    return news
            elif self._is_open:
                self._reading = asyncio.get_running_loop().create_future()
                await self._reading
            elif self._error is None:
                return None
            elif (line := self._other_line(self._error)) is not None:
                self._begin(line)
            else:
                await asyncio.sleep(self._tries.pause_s(self._final_error(self._error)))
                self._refusals.clear()
                self._begin(self._lines.choose(self._request))

    def close(self) -> None:
        """Cancels the request unless it has ended. May be called more than once."""
        if self._is_open:
            self._is_open = False
            self._line.cancel(self._stream_id)

    def received(self, response: pb.GenerateResponse) -> None:
        self._has_begun = True
        self._unread.append(response)
        if len(self._unread) >= MAX_UNREAD and not self._is_paused:
            self._is_paused = True
            self._line.pause(self._stream_id)
        self._wake()

    def ended(self, error: QuireError | None) -> None:
        self._is_open = self._is_paused = False
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def _other_line(self, error: QuireError) -> Line | None:
        """Returns the next scheduler for a request that was refused; None if it is not to be sent to another one."""
        if self._has_begun or not _is_of_scheduler(error):
            return None
        self._refusals.append((self._line, error))
        return self._lines.other(self._request, [line for line, _ in self._refusals])

    def _final_error(self, error: QuireError) -> QuireError:
        """Returns the error for the client: of several refusals that of the queue that has room first."""
        full = [each for _, each in self._refusals if isinstance(each, QueueFullError)]
        return min(full, key=lambda each: each.retry_after_s) if full and _is_of_scheduler(error) else error

    def _begin(self, line: Line) -> None:
        request, _ = self._tries.next_call()
        caller = self._caller
        opening = pb.OpenStream(
            request=request,
            authorization=caller.authorization,
            client=caller.address,
            traceparent=caller.traceparent,
            tracestate=caller.tracestate,
        )
        self._line = line
        self._stream_id = self._line.open(opening, self)
        self._is_open = True
        self._error = None


def _is_of_scheduler(error: QuireError) -> bool:
    """Returns whether a refusal is due to the state of the scheduler, so that another one may accept the request.

    After a lost connection, the request may be what has ended the scheduler: the rules of breaks bound its tries.
    """
    if isinstance(error, UnavailableError):
        return not is_lost_connection(error)
    return isinstance(error, QueueFullError) and not error.is_of_tenant
