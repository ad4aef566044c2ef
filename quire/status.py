"""Maps each gRPC status to its exception."""

from collections.abc import Iterable
from typing import Any

import grpc

from quire.errors import (
    CapacityExceededError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    OtherModelError,
    PermissionDeniedError,
    QueueFullError,
    QuireError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from quire.status_details import TRAILER, StatusDetails, status_details

_PLAIN: dict[grpc.StatusCode, type[QuireError]] = {
    grpc.StatusCode.OUT_OF_RANGE: CapacityExceededError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceededError,  # unless it comes with RetryInfo
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.FAILED_PRECONDITION: OtherModelError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}

_ENDED_WITHOUT_STATUS = "CANCELLED"
"""The message that gRPC writes if a server's process drops its open calls when it ends. A server that decides to cancel
a request says so in words of its own, and a call that this client has cancelled has another message."""

_FAILED_WRITE = "Internal error from Core"
"""The message with which grpc.aio replaces the status of a call that ends while it writes a request (grpc/grpc#36066).
A write fails for no other reason."""

_OTHER_HOST = "call host does not match SSL server name"
"""The message with which gRPC refuses a call before it sends it. The status is that of a wrong key."""

_NEVER_CONNECTED = "failed to connect"
"""The beginning of gRPC's message if there was no connection, whatever it says of the last attempt."""

_LOST_CONNECTION = ("socket closed", "stream removed", "connection reset", "broken pipe", "goaway", "cancelling all")
"""Words of gRPC's messages about a connection that was open; the status is the same as for a server that is absent."""


def is_lost_connection(error: UnavailableError) -> bool:
    """Returns whether the call had a connection, which is lost now. False for a message that is not known."""
    message = error.message.lower()
    return not message.startswith(_NEVER_CONNECTED) and any(words in message for words in _LOST_CONNECTION)


def from_rpc_error(error: grpc.RpcError) -> QuireError:
    """Returns the exception for a failed call; `error` was raised by `grpc` or `grpc.aio`."""
    call: Any = error  # grpc's base class does not declare the status that both kinds carry
    if call.code() is grpc.StatusCode.CANCELLED and call.details() == _ENDED_WITHOUT_STATUS:
        return UnavailableError("stream removed: the server ended during the call")
    if call.code() is grpc.StatusCode.INTERNAL and call.details() == _FAILED_WRITE:
        return UnavailableError("stream removed: the call ended while a request was sent")
    if call.code() is grpc.StatusCode.UNAUTHENTICATED and call.details() == _OTHER_HOST:
        return UnavailableError(
            "the server's certificate has no name that gRPC accepts for the host of its address: give it that name. A "
            "wildcard needs at least two names after it"
        )
    return from_status(call.code(), call.details() or "", call.trailing_metadata())


def from_status(
    code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]] | None = None
) -> QuireError:
    """Returns the exception for a status: an InternalError that names the code if the protocol does not use it."""
    details = _details(trailers)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(message, details.violations)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and details.retry_after_s is not None:
        return QueueFullError(message, details.retry_after_s, is_of_tenant=details.is_quota)
    if code in _PLAIN:
        return _PLAIN[code](message)
    return InternalError(f"unexpected status {code.name}: {message}", code.name)


def _details(trailers: Iterable[tuple[str, str | bytes]] | None) -> StatusDetails:
    for key, value in trailers or ():
        if key == TRAILER and isinstance(value, bytes):
            return status_details(value)
    return StatusDetails()
