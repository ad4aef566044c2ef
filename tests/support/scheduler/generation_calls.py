"""Calls to the public service, and the details of their errors."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from quire.v1 import generation_pb2 as pb
from tests.support.scheduler.servers import Served


def text_request(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


async def collect(call: Any, received: list[pb.GenerateResponse] | None = None) -> list[pb.GenerateResponse]:
    """Returns all messages. They are also in `received` if it is given, even after an error."""
    received = [] if received is None else received
    async for message in call:
        received.append(message)
    return received


async def failure(served: Served, request: pb.GenerateRequest, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served.generation.Generate(request, **options))
    return caught.value


def details(error: grpc.aio.AioRpcError) -> Status:
    trailers = dict(error.trailing_metadata() or ())
    return Status.FromString(trailers["grpc-status-details-bin"])


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    bad_request = BadRequest()
    assert details(error).details[0].Unpack(bad_request)
    return {violation.field: violation.description for violation in bad_request.field_violations}
