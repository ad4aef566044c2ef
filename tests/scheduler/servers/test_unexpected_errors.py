"""A bug in a request is counted, whatever call carried the request."""

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from quire.unexpected import NUM_UNEXPECTED
from quire.v1 import generation_pb2 as pb
from quire.v1 import tokenization_pb2
from quire.v1.tokenization_pb2_grpc import TokenizationStub
from scheduler.requests.intake import Intake
from tests.support.scheduler.generation_calls import text_request
from tests.support.scheduler.many_calls import code_of, many_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.scheduler.servers import Servers

INTERNAL = grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("method", ["Generate", "GenerateMany", "Tokenize"])
async def test_a_bug_is_counted(servers: "Servers", monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    @asynccontextmanager
    async def opened(*_: object) -> "AsyncIterator[Any]":
        raise ZeroDivisionError("on purpose")
        yield

    async def tokenized(*_: object) -> list[int]:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Intake, "open", opened)
    monkeypatch.setattr(Intake, "tokenize", tokenized)
    served = await servers.start()
    before = NUM_UNEXPECTED["request"]
    if method == "GenerateMany":
        async with many_call(served.generation) as call:
            await call.open(1, text_request())
            assert code_of(await call.end_of(1)) is INTERNAL
    elif method == "Generate":
        assert await served.generation.Generate(pb.GenerateRequest(text="a")).code() is INTERNAL
    else:
        wanted = tokenization_pb2.TokenizeRequest(text="a")
        assert await TokenizationStub(served.channel).Tokenize(wanted).code() is INTERNAL
    assert NUM_UNEXPECTED["request"] == before + 1
