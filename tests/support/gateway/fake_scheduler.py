"""A scheduler on real gRPC whose answers a test writes. It follows the contract of GenerateMany in generation.proto."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from quire.v1 import generation_pb2 as pb
from quire.v1 import replica_pb2 as replica_pb
from quire.v1 import tokenization_pb2 as tokens_pb
from quire.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from quire.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from quire.v1.tokenization_pb2_grpc import TokenizationServicer, add_TokenizationServicer_to_server

MODEL = "tiny"
Answer = AsyncIterator[pb.GenerateResponse]


class Failure(Exception):
    """Ends a stream with a status."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        violations: dict[str, str] | None = None,
        retry_after_s: float | None = None,
        is_of_tenant: bool = False,
    ) -> None:
        super().__init__(message)
        status = Status(code=code.value[0], message=message)
        details: list[Any] = []
        if violations:
            details.append(BadRequest())
            for field, problem in violations.items():
                details[-1].field_violations.add(field=field, description=problem)
        if retry_after_s is not None:
            delay = Duration()
            delay.FromNanoseconds(int(retry_after_s * 1e9))
            details.append(RetryInfo(retry_delay=delay))
        if is_of_tenant:
            details.append(QuotaFailure(violations=[QuotaFailure.Violation(subject="tenant", description=message)]))
        for detail in details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        self.ended = pb.Ended(
            code=code.value[0], message=message, status_details=status.SerializeToString() if details else b""
        )


class FakeScheduler(GenerationServicer, TokenizationServicer, ReplicaServicer):
    """Serves one token a step of "one two three …", resumed at the right place, unless `answer` is replaced.

    opened          every OpenStream, in order
    cancelled       numbers of the streams that the gateway cancelled
    paused          numbers of the streams that it paused
    num_calls       calls of GenerateMany that had streams
    key             the only key that is accepted; None: no identity is configured
    knows_grammars  False: it ignores them, as a scheduler of before structured output
    reports         what it tells routers: each call of Watch gets the reports that are put here meanwhile
    watches         ids of the routers that have called Watch
    is_hung         GetServerInfo gets no answer
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.knows_grammars = True
        self.answer: Callable[[pb.GenerateRequest], Answer] = self.words
        self.step_s = 0.001
        self.words_each = 3
        self.opened: list[pb.OpenStream] = []
        self.cancelled: list[int] = []
        self.paused: list[int] = []
        self.continued: list[int] = []
        self.num_calls = 0
        self.reports: asyncio.Queue[replica_pb.WatchResponse] | None = None
        self.watches: list[str] = []
        self.state = pb.SERVER_STATE_SERVING
        self.is_hung = False
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, asyncio.Event] = {}
        self._server: grpc.aio.Server | None = None
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        """Listens at the address that it had before, if it had one."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_GenerationServicer_to_server(self, self._server)
        add_TokenizationServicer_to_server(self, self._server)
        add_ReplicaServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        await self._server.start()

    async def stop(self) -> None:
        """Breaks all connections."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    @property
    def requests(self) -> list[pb.GenerateRequest]:
        return [opened.request for opened in self.opened]

    async def words(self, request: pb.GenerateRequest) -> Answer:
        """Answers each sequence with its words: "w0 w1 …" of sequence 0, and the rest of it for a resumption."""
        yield started(cached_tokens=1)
        num_prompt = 3
        if request.output.HasField("prompt_logprobs"):
            done = request.resume.num_prompt_logprobs
            logprobs = [logprob(100 + i, -0.5 * i) for i in range(1, num_prompt)][done:]
            yield pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=1 + done, tokens=logprobs))
        received = {each.index: each for each in request.resume.sequences}
        for index in range(request.sampling.n or 1):
            if index in received and received[index].finished:
                continue
            num_received = len(received[index].token_ids) if index in received else 0
            for i in range(num_received, self.words_each):
                await asyncio.sleep(self.step_s)
                yield delta(index, f"w{i} ", 10 + i, logprobs=request.output.HasField("logprobs"))
            yield finished(index, self.words_each)

    async def GenerateMany(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Any
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:  # the gateway has only asked whether it may call
            return
        self.num_calls += 1
        ready: asyncio.Queue[pb.StreamMessage] = asyncio.Queue()
        self._act(first, ready)
        reading = asyncio.create_task(self._read(requests, ready))
        try:
            while True:
                messages = [await ready.get()]
                while not ready.empty():
                    messages.append(ready.get_nowait())
                yield pb.GenerateManyResponse(messages=messages)
        finally:
            reading.cancel()
            for task in self._streams.values():
                task.cancel()
            self._streams.clear()

    async def _read(
        self, requests: AsyncIterator[pb.GenerateManyRequest], ready: asyncio.Queue[pb.StreamMessage]
    ) -> None:
        async for message in requests:
            self._act(message, ready)

    def _act(self, message: pb.GenerateManyRequest, ready: asyncio.Queue[pb.StreamMessage]) -> None:
        number = message.stream_id
        match message.WhichOneof("action"):
            case "open":
                self.opened.append(message.open)
                self._running[number] = asyncio.Event()
                self._running[number].set()
                self._streams[number] = asyncio.create_task(self._serve(number, message.open, ready))
            case "pause":
                self.paused.append(number)
                self._running[number].clear()
            case "continue":
                self.continued.append(number)
                self._running[number].set()
            case "cancel":
                self.cancelled.append(number)
                if (task := self._streams.pop(number, None)) is not None:  # it may have ended meanwhile
                    task.cancel()

    async def _serve(self, number: int, opened: pb.OpenStream, ready: asyncio.Queue[pb.StreamMessage]) -> None:
        ended = pb.Ended(code=0)
        try:
            if self.key is not None and opened.authorization != f"Bearer {self.key}":
                raise Failure(grpc.StatusCode.UNAUTHENTICATED, "the key is not known")
            async for response in self.answer(opened.request):
                await self._running[number].wait()
                if response.HasField("started"):
                    response.started.request_id = opened.request.request_id
                    has_grammar = opened.request.HasField("structured_output")
                    response.started.follows_grammar = has_grammar and self.knows_grammars
                ready.put_nowait(pb.StreamMessage(stream_id=number, response=response))
        except Failure as failure:
            ended = failure.ended
        ready.put_nowait(pb.StreamMessage(stream_id=number, ended=ended))
        self._streams.pop(number, None)

    async def _check_caller(self, context: Any) -> None:
        if self.is_hung:
            await asyncio.Event().wait()
        metadata = dict(context.invocation_metadata() or ())
        if self.key is not None and metadata.get("authorization") != f"Bearer {self.key}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the key is not known")

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        await self._check_caller(context)
        return pb.GetServerInfoResponse(model_name=MODEL, max_model_len=512, vocab_size=1000, state=self.state)

    async def Watch(  # type: ignore[override]  # noqa: N802
        self, request: replica_pb.WatchRequest, context: Any
    ) -> AsyncIterator[replica_pb.WatchResponse]:
        if self.reports is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this scheduler is too old")
            return
        self.watches.append(request.router_id)
        reports, number = self.reports, len(self.watches)
        while True:
            report = await reports.get()
            if number != len(self.watches):  # this call has ended meanwhile, and another one has begun
                reports.put_nowait(report)
                return
            yield report

    async def Identify(self, request: replica_pb.IdentifyRequest, context: Any) -> replica_pb.IdentifyResponse:  # noqa: N802
        return replica_pb.IdentifyResponse(tenant="default")

    async def Tokenize(self, request: tokens_pb.TokenizeRequest, context: Any) -> tokens_pb.TokenizeResponse:  # noqa: N802
        """Each byte is a token, after the special token 1 if special tokens are wanted."""
        text = request.text or "".join(message.content for message in request.chat.messages)
        is_plain = request.HasField("add_special_tokens") and not request.add_special_tokens
        ids = ([] if is_plain else [1]) + [byte + 2 for byte in text.encode()]
        parts = [_token_bytes(each) for each in ids] if request.return_bytes else []
        return tokens_pb.TokenizeResponse(token_ids=ids, tokens=parts, max_model_len=512)

    async def Detokenize(  # noqa: N802
        self, request: tokens_pb.DetokenizeRequest, context: Any
    ) -> tokens_pb.DetokenizeResponse:
        if any(each > 257 for each in request.token_ids):
            status = Failure(grpc.StatusCode.INVALID_ARGUMENT, "bad", violations={"token_ids[0]": "is no token"}).ended
            trailers = (("grpc-status-details-bin", status.status_details),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad", trailers)
        return tokens_pb.DetokenizeResponse(text=b"".join(map(_token_bytes, request.token_ids)).decode())

    async def GetTokenizerInfo(  # noqa: N802
        self, request: tokens_pb.GetTokenizerInfoRequest, context: Any
    ) -> tokens_pb.GetTokenizerInfoResponse:
        await self._check_caller(context)
        return tokens_pb.GetTokenizerInfoResponse(
            special_tokens={"bos_token": "<s>"}, eos_token_ids=[0], chat_template="{{ messages }}"
        )


def _token_bytes(token_id: int) -> bytes:
    return (b"</s>", b"<s>")[token_id] if token_id < 2 else bytes([token_id - 2])


def started(prompt_tokens: int = 3, cached_tokens: int = 0) -> pb.GenerateResponse:
    continuation = pb.Continuation(seed=5, prompt=pb.TokenIds(ids=[1, 2, 3]), model_digest="digest")
    return pb.GenerateResponse(
        started=pb.Started(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, continuation=continuation)
    )


def delta(index: int, text: str, *token_ids: int, logprobs: bool = False) -> pb.GenerateResponse:
    found = [logprob(each, -0.25, text.encode()) for each in token_ids] if logprobs else []
    return pb.GenerateResponse(delta=pb.Delta(index=index, text=text, token_ids=token_ids, logprobs=found))


def finished(
    index: int, completion_tokens: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_EOS
) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=completion_tokens)
    return pb.GenerateResponse(finished=pb.Finished(index=index, reason=reason, usage=usage))


def logprob(token_id: int, value: float, data: bytes | None = None) -> pb.TokenLogprobs:
    data = f"<{token_id}>".encode() if data is None else data
    chosen = pb.TokenLogprob(token_id=token_id, logprob=value, rank=1, bytes=data)
    other = pb.TokenLogprob(token_id=999, logprob=value - 1, rank=2, bytes=b"\xe2\x80")
    return pb.TokenLogprobs(chosen=chosen, top=[chosen, other])
