"""Answers the requests that generate text, whatever their endpoint: opens the streams, and writes what they say."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Chunks, EchoedPrompt, Head, ParsedRequest
from gateway.api.errors import ApiError, from_quire_error, unavailable
from gateway.http.model_tools import prepare
from gateway.http.reader import Reader
from gateway.http.request_ids import id_headers, new_id
from gateway.schedulers.open_requests import OpenRequests
from gateway.schedulers.stream import Caller, GenerationStream, trace_header
from quire.errors import InternalError, QueueFullError, QuireError, UnavailableError
from quire.v1 import tokenization_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from gateway.http.model_tools import ServedModelTools
    from gateway.http.served_models import ServedModels
    from gateway.metrics import GatewayMetrics
    from gateway.schedulers.schedulers import Schedulers
    from quire.http.json_bodies import JsonBodies
    from quire.http.slow_readers import SlowReaders
    from quire.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

STREAM_FAILED = "a stream failed after it began, with what would have been status %s: %s"

EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a reverse proxy must not collect the chunks
}


class GenerationHandler:
    """Serves every endpoint that generates text. A connection that closes cancels its requests.

    max_open  requests that generate text at the same time; more are refused
    """

    def __init__(
        self,
        schedulers: Schedulers,
        models: ServedModels,
        tools: ServedModelTools,
        bodies: JsonBodies,
        metrics: GatewayMetrics,
        readers: SlowReaders,
        max_open: int,
    ) -> None:
        self._schedulers = schedulers
        self._models = models
        self._tools = tools
        self._bodies = bodies
        self._metrics = metrics
        self._readers = readers
        self.requests = OpenRequests(max_open)

    async def serve(self, request: web.Request, parse: Callable[[object], ParsedRequest]) -> web.StreamResponse:
        """Answers one request. Raises ApiError if it fails before the answer has begun."""
        began_s = time.monotonic()
        with self._counted(request):
            parsed = await self._bodies.read(request, parse)
            caller = caller_of(request)
            try:
                return await self._answer(request, parsed, caller, began_s)
            except QuireError as error:
                raise from_quire_error(error, parsed.names) from None

    async def _answer(
        self, request: web.Request, parsed: ParsedRequest, caller: Caller, began_s: float
    ) -> web.StreamResponse:
        """Raises ApiError and QuireError, unless the answer has begun."""
        model = await self._models.checked(parsed.model, caller.authorization)
        answer_id = new_id(parsed.id_prefix)
        tools = await self._tools.of(parsed)
        reading = None
        if tools is not None:
            is_within = await self._tools.begins_in_thought(parsed, tools, caller.authorization)
            reading = prepare(parsed, tools, answer_id, begins_in_thought=is_within)
        head = Head(answer_id, model, int(time.time()), reading, {} if tools is None else tools.eos_tokens)
        echoes = await self._echoes(parsed, caller) if parsed.echo else ()
        streams: list[GenerationStream] = []
        try:
            for i, each in enumerate(parsed.requests):
                if not each.request_id:
                    each.request_id = head.id if len(parsed.requests) == 1 else f"{head.id}-{i}"
                with _errors_of(parsed, i):
                    streams.append(await self._schedulers.open(each, caller))
            if parsed.is_streamed:
                return await self._stream(request, parsed, head, echoes, streams, began_s)
            collector = parsed.collector(head, echoes)
            async for i, messages in _merged(parsed, streams):
                for message in messages:
                    collector.add(i, message)
            return web.json_response(text=to_json(collector.body()), headers=id_headers())
        finally:
            for stream in streams:
                stream.close()

    async def _stream(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        head: Head,
        echoes: Sequence[EchoedPrompt],
        streams: list[GenerationStream],
        began_s: float,
    ) -> web.StreamResponse:
        """Writes the events. Errors before the first message are raised; later ones become an event."""
        chunks = parsed.chunks(head, echoes)
        response = web.StreamResponse(headers=EVENT_HEADERS | id_headers())
        if request.version < HttpVersion11:  # it has no chunks, so only the end of the connection ends the answer
            response.force_close()
        reader = Reader(request, response)
        has_text = False
        self._readers.add(reader)
        try:
            async for i, messages in _merged(parsed, streams):
                if not response.prepared:
                    await response.prepare(request)
                if text := "".join([chunks.encode(i, message) for message in messages]):
                    # A short answer arrives at once, and its last message is then its end.
                    if not has_text and any(message.HasField("delta") for message in messages):
                        has_text = True
                        self._metrics.first_token.observe(time.monotonic() - began_s)
                        if reader.has_chunks:
                            for k, stream in enumerate(streams):
                                stream.deliver_to(_ChunkWriter(chunks, k, reader))
                    await reader.write(text)
            await reader.write(chunks.end())
        except (QuireError, ApiError) as error:
            if not response.prepared:
                raise
            failure = from_quire_error(error, parsed.names) if isinstance(error, QuireError) else error
            log.warning(STREAM_FAILED, failure.status, failure.message, extra={"request_id": head.id})
            await self._fail(chunks, reader, failure)
        except ConnectionError:
            self._count_disconnect(request)
        except Exception:
            if not response.prepared:
                raise
            log.exception("a stream failed because of a bug", extra={"request_id": head.id})
            failure = from_quire_error(InternalError("internal error; see the gateway's log"), {})
            await self._fail(chunks, reader, failure)
        finally:
            self._readers.remove(reader)
        return response

    async def _fail(self, chunks: Chunks, reader: Reader, failure: ApiError) -> None:
        """Ends a stream that has begun. It has the status 200, so its failure is counted apart."""
        self._metrics.stream_failures.labels(str(failure.status)).inc()
        await reader.write(chunks.failure(failure))

    async def _echoes(self, parsed: ParsedRequest, caller: Caller) -> list[EchoedPrompt]:
        return await asyncio.gather(*(self._echo(parsed, i, caller) for i in range(len(parsed.requests))))

    async def _echo(self, parsed: ParsedRequest, i: int, caller: Caller) -> EchoedPrompt:
        """Returns the text of a prompt. With log-probabilities, a text is replaced by its token ids.

        Log-probabilities begin with the second token, so the text of the first one is asked for.
        """
        request = parsed.requests[i]
        text = request.text if request.HasField("text") else None
        if text is not None and not parsed.echo_logprobs:
            return EchoedPrompt(text)
        with _errors_of(parsed, i):
            if text is not None:
                wanted = tokenization_pb2.TokenizeRequest(text=text)
                tokenized = await self._schedulers.tokenization("Tokenize", wanted, caller.authorization)
                request.token_ids.ids.extend(tokenized.token_ids)
            ids = list(request.token_ids.ids)
            if text is None:
                text = await self._text(ids, caller)
            return EchoedPrompt(text, await self._text(ids[:1], caller) if parsed.echo_logprobs and ids else None)

    async def _text(self, ids: list[int], caller: Caller) -> str:
        wanted = tokenization_pb2.DetokenizeRequest(token_ids=ids)
        return str((await self._schedulers.tokenization("Detokenize", wanted, caller.authorization)).text)

    @contextmanager
    def _counted(self, request: web.Request) -> Iterator[None]:
        """Counts a request while it is open. Raises ApiError if it cannot be served now."""
        with ExitStack() as open_request:
            try:
                open_request.enter_context(self.requests.counted())
            except UnavailableError as error:
                raise unavailable(error.message) from None
            except QueueFullError as error:
                raise from_quire_error(error, {}) from None
            open_request.enter_context(self._metrics.open_requests.track_inprogress())
            try:
                yield
            except asyncio.CancelledError:
                self._count_disconnect(request)
                raise

    def _count_disconnect(self, request: web.Request) -> None:
        """Counts a client that went away. One that was dropped counts as a slow reader."""
        if not self._readers.has_dropped(request.protocol):
            self._metrics.disconnects.inc()


class _ChunkWriter:
    """Writes the chunk of each message at once. The response has begun."""

    __slots__ = ("_chunks", "_prompt", "_reader", "is_free")

    def __init__(self, chunks: Chunks, prompt: int, reader: Reader) -> None:
        self._chunks = chunks
        self._prompt = prompt
        self._reader = reader
        self.is_free = reader.is_free

    def take(self, message: pb.GenerateResponse) -> None:
        if text := self._chunks.encode(self._prompt, message):
            self._reader.write_now(text)


def caller_of(request: web.Request) -> Caller:
    """Returns the client of a request. Its credentials are passed on; the scheduler verifies them."""
    headers = request.headers
    return Caller(
        authorization=authorization_of(request),
        address=(request.remote or "")[:256],
        traceparent=trace_header(headers.get("traceparent", ""), 256),
        tracestate=trace_header(",".join(headers.getall("tracestate", [])), 512),
    )


def authorization_of(request: web.Request) -> str:
    """Returns the `Authorization` header; empty if there is none. Raises ApiError if gRPC could not carry it.

    Anthropic's clients send the key in a header of its own.
    """
    authorization = request.headers.get("Authorization", "")
    if not authorization and (key := request.headers.get("X-Api-Key")):
        authorization = f"Bearer {key}"
    if not (authorization.isascii() and (authorization.isprintable() or not authorization)):
        raise ApiError("the Authorization header must be printable ASCII", status=401, code="invalid_api_key")
    return authorization


@contextmanager
def _errors_of(parsed: ParsedRequest, i: int) -> Iterator[None]:
    """Turns a QuireError about one of several requests into an ApiError."""
    try:
        yield
    except QuireError as error:
        raise from_quire_error(error, parsed.names_of(i)) from None


async def _merged(
    parsed: ParsedRequest, streams: Sequence[GenerationStream]
) -> AsyncIterator[tuple[int, list[pb.GenerateResponse]]]:
    """Yields the index of a stream and its messages, whichever arrive first. Raises the error of the first failure."""
    if len(streams) == 1:
        while (messages := await streams[0].next()) is not None:
            yield 0, messages
        return
    reading = {asyncio.ensure_future(stream.next()): i for i, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = reading.pop(task)
                with _errors_of(parsed, i):
                    messages = task.result()
                if messages is not None:
                    reading[asyncio.ensure_future(streams[i].next())] = i
                    yield i, messages
    finally:
        for task in reading:
            task.cancel()
