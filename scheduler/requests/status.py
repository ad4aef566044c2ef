"""Maps errors to gRPC statuses, with details that clients can act upon.

Details follow google.rpc (AIP-193): a serialised google.rpc.Status in the trailer `grpc-status-details-bin`, with
BadRequest for an invalid request and RetryInfo for a full queue. QuotaFailure beside RetryInfo says that the limit is
one of the client's tenant.
"""

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any as AnyType
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from quire.garbage import drop_frames
from quire.status_details import TRAILER
from quire.unexpected import unexpected
from scheduler.core import (
    CapacityExceeded,
    InvalidRequest,
    InvariantViolation,
    QueueFull,
    QuireError,
    TenantLimitReached,
    Unavailable,
)

Context = grpc.aio.ServicerContext[AnyType, AnyType]
_T = TypeVar("_T")

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 512
MAX_RETRY_S = 86_400.0
"""Longest time after which a client is told to try again."""

MAX_DETAILS_BYTES = 4096
"""Maximum size of the serialised details.

gRPC limits metadata, and so trailers, to 8 KiB; a client receives another error if they are larger. The trailers hold
the message percent-encoded (at worst three times as long), and in base64 the details, which repeat it.
"""


class RequestCancelled(QuireError):
    """The request was cancelled on the server's side."""


class DeadlineExceeded(QuireError):
    """The request's deadline passed, in the queue or later."""


class ReaderStalled(QuireError):
    """The client accepts no messages, so its output would accumulate."""


class RequestFailed(QuireError):
    """The engine gave up the request because of a bug in the scheduler or the executor."""


class GrammarFailed(QuireError):
    """The executor could not follow the request's grammar: that was too expensive, or no token fitted."""


class OtherModel(QuireError):
    """The stream that a request resumes was begun by another model, or with other weights."""


class BadMessage(QuireError):
    """A message may take long to parse, or cannot be parsed. The text says why.

    first_number  the value of the message's first field if that is a number with field number 1; otherwise None. It
                  identifies the stream of a GenerateManyRequest
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.first_number: int | None = None


CODES: dict[type[BaseException], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    BadMessage: grpc.StatusCode.INVALID_ARGUMENT,
    GrammarFailed: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityExceeded: grpc.StatusCode.OUT_OF_RANGE,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TenantLimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ReaderStalled: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    OtherModel: grpc.StatusCode.FAILED_PRECONDITION,
    InvariantViolation: grpc.StatusCode.INTERNAL,
    RequestFailed: grpc.StatusCode.INTERNAL,
}
"""Status codes by error class; the most derived class counts. Any other error is a bug: INTERNAL."""


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """The arguments of `context.abort`."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, bytes], ...]


def code_of(error: BaseException) -> grpc.StatusCode:
    """Returns the status code of an error."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return grpc.StatusCode.INTERNAL


def status_of(error: BaseException) -> RpcStatus:
    """Returns the status of an error, with its details."""
    code = code_of(error)
    # The message of a bug goes to the log only, because it may quote another request.
    is_bug = code is grpc.StatusCode.INTERNAL and not isinstance(error, RequestFailed)
    message = "internal error; see the server's log" if is_bug else str(error)
    message = _shortened(message, MAX_MESSAGE_BYTES)
    details = _details(error)
    if not details:
        return RpcStatus(code, message, ())
    status = Status(code=code.value[0], message=message, details=details)
    return RpcStatus(code, message, ((TRAILER, status.SerializeToString()),))


async def abort(context: Context, error: BaseException) -> NoReturn:
    """Ends a call with the status of an error."""
    status = status_of(error)
    drop_frames(error)
    await context.abort(status.code, status.message, status.trailers)


async def or_abort(work: Awaitable[_T], context: Context, name: str = "request") -> _T:
    """Returns what the work returns, or ends the call with the status of its error. Cancellation passes through.

    name  name of the work in the log, if it fails because of a bug
    """
    try:
        return await work
    except QuireError as error:
        failure: Exception = error
    except Exception as error:
        log.exception(f"a {name} failed because of a bug")
        unexpected("request")
        failure = error
    await abort(context, failure)
    raise failure  # `abort` raises, which ruff cannot know


def _details(error: BaseException) -> list[Any]:
    if isinstance(error, InvalidRequest):
        return [_packed(_bad_request(error.violations))]
    if isinstance(error, QueueFull):
        delay = Duration()
        delay.FromNanoseconds(int(min(error.retry_after_s, MAX_RETRY_S) * 1e9))
        retry = _packed(RetryInfo(retry_delay=delay))
        return [retry, _packed(_quota_failure(error))] if isinstance(error, TenantLimitReached) else [retry]
    return []


def _quota_failure(error: TenantLimitReached) -> QuotaFailure:
    description = _shortened(str(error), MAX_MESSAGE_BYTES)
    return QuotaFailure(violations=[QuotaFailure.Violation(subject="tenant", description=description)])


def _bad_request(violations: dict[str, str]) -> BadRequest:
    """Returns as many of the violations as MAX_DETAILS_BYTES allows."""
    bad_request = BadRequest()
    for field, problem in violations.items():
        bad_request.field_violations.add(field=field, description=_shortened(problem, MAX_MESSAGE_BYTES))
        if bad_request.ByteSize() > MAX_DETAILS_BYTES:
            del bad_request.field_violations[-1]
            break
    return bad_request


def _packed(message: BadRequest | QuotaFailure | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _shortened(text: str, max_bytes: int) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= max_bytes else data[: max_bytes - 3].decode(errors="ignore") + "…"
