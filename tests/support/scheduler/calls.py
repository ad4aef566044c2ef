"""Calls to the public service, and what their errors say."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from quire.v1 import generation_pb2 as wire
from tests.scheduler.conftest import Served


def text_request(text: str = "hello", **fields: Any) -> wire.GenerateRequest:
    return wire.GenerateRequest(text=text, **fields)


async def collect(call: Any, received: list[wire.GenerateResponse] | None = None) -> list[wire.GenerateResponse]:
    """All messages, in `received` if given: there they are after an error, too."""
    received = [] if received is None else received
    async for message in call:
        received.append(message)
    return received


async def failure(served: Served, request: wire.GenerateRequest, **options: Any) -> grpc.aio.AioRpcError:
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
