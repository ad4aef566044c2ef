"""The services of quire.v1 that the gateway offers. It makes each call at a scheduler, on behalf of its client."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import grpc

from gateway.rpc.calls import calling
from gateway.rpc.status import abort, rpc_status
from gateway.schedulers.open_requests import OpenRequests
from quire.errors import InternalError, LimitExceededError, QuireError
from quire.v1 import generation_pb2 as pb
from quire.v1 import tokenization_pb2 as tokens_pb
from quire.v1.generation_pb2_grpc import GenerationServicer
from quire.v1.tokenization_pb2_grpc import TokenizationServicer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Any, TypeVar

    from gateway.metrics import GatewayMetrics
    from gateway.schedulers.schedulers import Schedulers
    from gateway.schedulers.stream import Caller

    Context = grpc.aio.ServicerContext[Any, Any]
    T = TypeVar("T")

log = logging.getLogger(__name__)

_GENERATION = pb.DESCRIPTOR.services_by_name["Generation"].full_name
_TOKENIZATION = tokens_pb.DESCRIPTOR.services_by_name["Tokenization"].full_name


class GenerationForwarder(GenerationServicer):
    """Offers Generate and GetServerInfo. A stream continues by itself after its scheduler has died.

    max_open         requests that are open at once; more are refused
    reader_timeout_s time after which a client that accepts no message loses its stream
    """

    def __init__(self, schedulers: Schedulers, max_open: int, reader_timeout_s: float, metrics: GatewayMetrics) -> None:
        self._schedulers = schedulers
        self._metrics = metrics
        self._metrics.may_fail(f"/{_GENERATION}/Generate", "UNAVAILABLE", "INTERNAL")
        self.requests = OpenRequests(max_open)
        self._reader_timeout_s = reader_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        began_s = time.monotonic()

        async def forward(caller: Caller) -> None:
            has_text = False
            with self.requests.counted(), self._metrics.open_requests.track_inprogress():
                stream = await self._schedulers.open(request, caller)
                try:
                    while (messages := await stream.next()) is not None:
                        for message in messages:
                            if not has_text and message.HasField("delta"):
                                has_text = True
                                self._metrics.first_token.observe(time.monotonic() - began_s)
                            await self._write(_answer(message, request), context)
                finally:
                    stream.close()

        await _or_abort(forward, context, self._metrics, f"/{_GENERATION}/Generate")

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

        return await _or_abort(ask, context, self._metrics, f"/{_GENERATION}/GetServerInfo")

    async def _write(self, message: pb.GenerateResponse, context: Context) -> None:
        """Raises LimitExceededError if the client does not read."""
        try:
            async with asyncio.timeout(self._reader_timeout_s):
                await context.write(message)
        except TimeoutError:
            self._metrics.slow_readers.inc()
            raise LimitExceededError(f"the client has read nothing for {self._reader_timeout_s:g} s") from None


class TokenizationForwarder(TokenizationServicer):
    """Offers all calls of Tokenization."""

    def __init__(self, schedulers: Schedulers, metrics: GatewayMetrics) -> None:
        self._schedulers = schedulers
        self._metrics = metrics

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

        return await _or_abort(ask, context, self._metrics, f"/{_TOKENIZATION}/{method}")


def _answer(message: pb.GenerateResponse, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """Returns the message without what only this gateway has asked for: how to continue the stream elsewhere."""
    if request.resumable or request.HasField("resume") or not message.started.HasField("continuation"):
        return message
    shown = pb.GenerateResponse()
    shown.CopyFrom(message)
    shown.started.ClearField("continuation")
    return shown


async def _or_abort(work: Callable[[Caller], Awaitable[T]], context: Context, metrics: GatewayMetrics, path: str) -> T:
    """Does the work for the client of a call, and counts the call. An error ends the call with its status."""
    failure: QuireError
    try:
        with calling(context) as caller:
            done = await work(caller)
        metrics.requests.labels(path, grpc.StatusCode.OK.name).inc()
        return done
    except QuireError as error:
        failure = error
    except asyncio.CancelledError:
        metrics.disconnects.inc()
        raise
    except Exception:
        log.exception("a call failed because of a bug")
        failure = InternalError("internal error; see the gateway's log")
    metrics.requests.labels(path, rpc_status(failure)[0].name).inc()
    await abort(context, failure)
    raise failure  # `abort` raises, which mypy cannot know
