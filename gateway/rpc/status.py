"""Maps the errors of schedulers back to the gRPC statuses that they came as, with their details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from quire.errors import InvalidRequestError, QueueFullError
from quire.garbage import drop_frames
from quire.status_details import TRAILER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from quire.errors import QuireError

_CODES = {code.name: code for code in grpc.StatusCode}


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """Ends a call with the status of an error."""
    code, message, trailers = rpc_status(error)
    drop_frames(error)
    await context.abort(code, message, trailers)


def rpc_status(error: QuireError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Returns the arguments of `context.abort`. A client gets the same exception from them as this gateway did."""
    code = _CODES.get(error.code, grpc.StatusCode.INTERNAL)
    status = Status(code=code.value[0], message=error.message)
    for detail in _details(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return code, error.message, ((TRAILER, status.SerializeToString()),) if status.details else ()


def _details(error: QuireError) -> Iterator[Message]:
    if isinstance(error, InvalidRequestError) and error.violations:
        violations = [
            BadRequest.FieldViolation(field=field, description=problem) for field, problem in error.violations.items()
        ]
        yield BadRequest(field_violations=violations)
    if isinstance(error, QueueFullError):
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        yield RetryInfo(retry_delay=delay)
        if error.is_of_tenant:
            violation = QuotaFailure.Violation(subject="tenant", description=error.message)
            yield QuotaFailure(violations=[violation])
