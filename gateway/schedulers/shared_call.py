"""One call of GenerateMany that carries the streams of many requests to and from one scheduler."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from quire.errors import (
    LimitExceededError,
    PermissionDeniedError,
    QuireError,
    UnauthenticatedError,
    UnavailableError,
)
from quire.status import from_rpc_error, from_status, is_lost_connection
from quire.status_details import TRAILER
from quire.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 2**20 - 2**16
"""Most bytes of one request. A scheduler accepts messages of 4 MiB; a larger one would end the call and all its
streams."""

REFUSED_TO_CLIENTS = "the gateway is not allowed to call the scheduler; see its log"

_NAMES_ADDRESS = re.compile(r"\b(ipv4|ipv6|unix|unix-abstract|vsock|dns):|\b(resolving|resolution)\b", re.IGNORECASE)
"""Finds gRPC's own messages about a connection, which name the address of the scheduler."""

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamMoved(UnavailableError):
    """The stream was left at its scheduler, and has to be continued at another one."""


class GatewayRefused(QuireError):
    """The scheduler refuses this gateway itself, and none of its clients."""


class Receiver(Protocol):
    """The receiving side of one stream. The methods are called on the event loop, and must return soon."""

    @property
    def can_move(self) -> bool:
        """True if the stream can be continued at another scheduler."""

    @property
    def is_suspect(self) -> bool:
        """True if the stream was moved and has made no progress since."""

    def received(self, response: pb.GenerateResponse) -> None:
        """Called for each message of the stream."""

    def ended(self, error: QuireError | None) -> None:
        """Called once, when no message follows. The error is None if the request has ended well."""


class SharedCall:
    """Makes the call when the first stream needs it, and again after it broke.

    method    `GenerateMany` of a stub of grpc.aio
    metadata  credentials of this process
    on_break  called when the call has ended with an error
    """

    def __init__(
        self, method: Any, metadata: tuple[tuple[str, str], ...], on_break: Callable[[QuireError], None]
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._on_break = on_break
        self._receivers: dict[int, Receiver] = {}
        self._unsent: deque[pb.GenerateManyRequest] = deque()
        self._has_unsent = asyncio.Event()
        self._last_id = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_streams(self) -> int:
        """The number of open streams."""
        return len(self._receivers)

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    async def check(self, timeout_s: float) -> None:
        """Makes a call without streams, to ask whether streams would be accepted. Raises QuireError."""
        try:
            async for _ in self._method(iter(()), metadata=self._metadata, timeout=timeout_s):
                pass
        except grpc.RpcError as error:
            raise error_of_own_call(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc.aio cancels the call itself if the connection breaks while it ends the requests.
            raise UnavailableError("stream removed: the connection was lost") from None

    def open(self, opening: pb.OpenStream, receiver: Receiver) -> int:
        """Sends a request, and returns the number of its stream. Raises LimitExceededError for one that is too long."""
        if opening.ByteSize() > MAX_REQUEST_BYTES:
            raise LimitExceededError(f"the request is longer than {MAX_REQUEST_BYTES} bytes")
        if not self.is_open:
            self._unsent.clear()
            self._task = asyncio.create_task(self._run(), name="GenerateMany")
        self._last_id += 1
        self._receivers[self._last_id] = receiver
        self._send(pb.GenerateManyRequest(stream_id=self._last_id, open=opening))
        return self._last_id

    def pause(self, stream_id: int) -> None:
        """Stops the messages of a stream, because its reader is slow."""
        if stream_id in self._receivers:
            self._send(pb.GenerateManyRequest(stream_id=stream_id, pause=pb.PauseStream()))

    def proceed(self, stream_id: int) -> None:
        """Undoes `pause`."""
        if stream_id in self._receivers:
            message = pb.GenerateManyRequest(stream_id=stream_id)
            getattr(message, "continue").SetInParent()  # the field has the name of a keyword
            self._send(message)

    def cancel(self, stream_id: int) -> None:
        """Ends a stream that has not ended. Its receiver is not called any more."""
        if self._receivers.pop(stream_id, None) is not None:
            self._send(pb.GenerateManyRequest(stream_id=stream_id, cancel=pb.CancelStream()))

    def move(self, *, with_suspects: bool) -> int:
        """Leaves the streams that can be continued elsewhere, and returns their number."""
        moved = {
            number: receiver
            for number, receiver in self._receivers.items()
            if receiver.can_move and (with_suspects or not receiver.is_suspect)
        }
        for number, receiver in moved.items():
            self.cancel(number)
            receiver.ended(StreamMoved("the stream moves to another scheduler"))
        return len(moved)

    async def close(self) -> None:
        """Ends the call, and with it all streams."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    def _send(self, message: pb.GenerateManyRequest) -> None:
        self._unsent.append(message)
        self._has_unsent.set()

    async def _run(self) -> None:
        """Makes one call, and ends its streams when it has ended."""
        error: QuireError = UnavailableError("the connection was closed")
        writing: asyncio.Task[None] | None = None
        call = self._method(metadata=self._metadata)
        try:
            writing = asyncio.create_task(self._write(call))
            await self._read(call)
            error = UnavailableError("stream removed: the scheduler has ended the call")
        except grpc.RpcError as rpc_error:
            error = error_of_own_call(rpc_error)
        except asyncio.CancelledError:  # `close`, or the channel was closed
            pass
        except Exception:
            log.exception("the call failed because of a bug")
        finally:
            call.cancel()
            if writing is not None:
                writing.cancel()
            self._on_break(error)
            if isinstance(error, GatewayRefused):
                # To a client it is a scheduler that cannot be used now: another one may accept the gateway.
                error = UnavailableError(REFUSED_TO_CLIENTS)
            error = for_clients(error)
            receivers, self._receivers = self._receivers, {}
            self._task = None  # so that the next stream begins a new call
            for receiver in receivers.values():
                receiver.ended(error)

    async def _read(self, call: Any) -> None:
        receivers = self._receivers
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                return
            for message in response.messages:
                receiver = receivers.get(message.stream_id)
                if receiver is None:  # the stream was cancelled
                    continue
                if message.HasField("response"):
                    receiver.received(message.response)
                elif message.HasField("ended"):
                    del receivers[message.stream_id]
                    receiver.ended(_error_of(message.ended))

    async def _write(self, call: Any) -> None:
        try:
            while True:
                while self._unsent:
                    await call.write(self._unsent.popleft())
                self._has_unsent.clear()
                await self._has_unsent.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader gets the status of the call


def error_of_own_call(rpc_error: grpc.RpcError) -> QuireError:
    """Returns the error of a call that this process made with credentials of its own, and for none of its clients."""
    error = from_rpc_error(rpc_error)
    if isinstance(error, UnauthenticatedError | PermissionDeniedError):
        return GatewayRefused(error.message)
    return error


def for_clients(error: QuireError) -> QuireError:
    """Returns the error without the address of the scheduler, which is for the gateway's log alone."""
    if not isinstance(error, UnavailableError) or not _NAMES_ADDRESS.search(error.message):
        return error
    if is_lost_connection(error):
        return UnavailableError("stream removed: the connection to the scheduler was lost")
    return UnavailableError("the scheduler cannot be reached")


def _error_of(ended: pb.Ended) -> QuireError | None:
    code = _STATUS_CODES.get(ended.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return None
    return from_status(code, ended.message, ((TRAILER, ended.status_details),) if ended.status_details else None)
