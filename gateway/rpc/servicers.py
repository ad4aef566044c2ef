"""The services of quire.v1 that the gateway offers. It makes each call at a scheduler, on behalf of its client."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from gateway.rpc.calls import calling
from gateway.rpc.status import abort
from gateway.schedulers.open_requests import OpenRequests
from quire.errors import InternalError, LimitExceededError, QuireError
from quire.v1 import generation_pb2 as pb
from quire.v1 import tokenization_pb2 as tokens_pb
from quire.v1.generation_pb2_grpc import GenerationServicer
from quire.v1.tokenization_pb2_grpc import TokenizationServicer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Any, TypeVar

    from gateway.schedulers.schedulers import Schedulers
    from gateway.schedulers.stream import Caller

    Context = grpc.aio.ServicerContext[Any, Any]
    T = TypeVar("T")

log = logging.getLogger(__name__)


class GenerationForwarder(GenerationServicer):
    """Offers Generate and GetServerInfo. A stream continues by itself after its scheduler has died.

    max_open         requests that are open at once; more are refused
    reader_timeout_s time after which a client that accepts no message loses its stream
    """

    def __init__(self, schedulers: Schedulers, max_open: int, reader_timeout_s: float) -> None:
        self._schedulers = schedulers
        self.requests = OpenRequests(max_open)
        self._reader_timeout_s = reader_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        async def forward(caller: Caller) -> None:
            with self.requests.counted():
                stream = await self._schedulers.open(request, caller)
                try:
                    while (messages := await stream.next()) is not None:
                        for message in messages:
                            await self._write(_answer(message, request), context)
                finally:
                    stream.close()

        await _or_abort(forward, context)

    async def GenerateMany(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> None:
        """Never runs (`gateway.rpc.calls`): the call is for a process before a scheduler, which this one is."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this gateway does not offer the method")

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Describes one scheduler, with the numbers of requests at all of them."""

        async def ask(caller: Caller) -> pb.GetServerInfoResponse:
            info = await self._schedulers.info_for(caller.authorization)
            known = [each.info for each in self._schedulers.all if each.is_ready and each.info is not None]
            if len(self._schedulers.all) > 1 and known:
                info.num_waiting = sum(each.num_waiting for each in known)
                info.num_running = sum(each.num_running for each in known)
            return info

        return await _or_abort(ask, context)

    async def _write(self, message: pb.GenerateResponse, context: Context) -> None:
        """Raises LimitExceededError if the client does not read."""
        try:
            async with asyncio.timeout(self._reader_timeout_s):
                await context.write(message)
        except TimeoutError:
            raise LimitExceededError(f"the client has read nothing for {self._reader_timeout_s:g} s") from None


class TokenizationForwarder(TokenizationServicer):
    """Offers all calls of Tokenization."""

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers

    async def Tokenize(self, request: tokens_pb.TokenizeRequest, context: Context) -> tokens_pb.TokenizeResponse:  # noqa: N802
        answer: tokens_pb.TokenizeResponse = await self._forward("Tokenize", request, context)
        return answer

    async def Detokenize(  # noqa: N802
        self, request: tokens_pb.DetokenizeRequest, context: Context
    ) -> tokens_pb.DetokenizeResponse:
        answer: tokens_pb.DetokenizeResponse = await self._forward("Detokenize", request, context)
        return answer

    async def GetTokenizerInfo(  # noqa: N802
        self, request: tokens_pb.GetTokenizerInfoRequest, context: Context
    ) -> tokens_pb.GetTokenizerInfoResponse:
        answer: tokens_pb.GetTokenizerInfoResponse = await self._forward("GetTokenizerInfo", request, context)
        return answer

    async def _forward(self, method: str, request: Any, context: Context) -> Any:
        async def ask(caller: Caller) -> Any:
            return await self._schedulers.tokenization(method, request, caller.authorization)

        return await _or_abort(ask, context)


def _answer(message: pb.GenerateResponse, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """Returns the message without what only this gateway has asked for: how to continue the stream elsewhere."""
    if request.resumable or request.HasField("resume") or not message.started.HasField("continuation"):
        return message
    shown = pb.GenerateResponse()
    shown.CopyFrom(message)
    shown.started.ClearField("continuation")
    return shown


async def _or_abort(work: Callable[[Caller], Awaitable[T]], context: Context) -> T:
    """Does the work for the client of a call. An error ends the call with its status."""
    failure: QuireError
    try:
        with calling(context) as caller:
            return await work(caller)
    except QuireError as error:
        failure = error
    except Exception:
        log.exception("a call failed because of a bug")
        failure = InternalError("internal error; see the gateway's log")
    await abort(context, failure)
    raise failure  # `abort` raises, which mypy cannot know
