"""Clients of GenerateMany that sort what they receive by stream: over gRPC, and without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.identity.identity import ANONYMOUS
from scheduler.requests.intake import Intake
from scheduler.servers.access import Access
from scheduler.servers.generation_server import read_fields
from scheduler.servers.loop_share import LoopShare
from scheduler.servers.many_streams import ManyStreams
from scheduler.servers.stream_opener import StreamOpener
from tests.support.scheduler.fake_engine import Submitted
from tests.support.scheduler.generation_calls import text_request
from tests.support.scheduler.servers import Served
from tests.support.waiting import until


class Received:
    """Holds what a client has received, by stream id.

    messages       of each stream that has any
    ended          the last message of each stream that has ended
    num_responses  GenerateManyResponses
    """

    def __init__(self) -> None:
        self.messages: dict[int, list[pb.GenerateResponse]] = {}
        self.ended: dict[int, pb.Ended] = {}
        self.num_responses = 0

    def add(self, response: pb.GenerateManyResponse) -> None:
        assert response.messages, "an empty response"
        self.num_responses += 1
        for message in response.messages:
            assert message.stream_id not in self.ended, "a message after the end"
            if message.HasField("ended"):
                self.ended[message.stream_id] = message.ended
            else:
                assert message.response.WhichOneof("event"), "an empty message"
                self.messages.setdefault(message.stream_id, []).append(message.response)

    async def end_of(self, stream_id: int) -> pb.Ended:
        """Returns the last message of a stream when it has arrived."""
        await until(lambda: stream_id in self.ended, what=f"end of stream {stream_id}")
        return self.ended[stream_id]

    async def complete(self, stream_id: int) -> list[pb.GenerateResponse]:
        """Returns the messages of a stream that ends with OK."""
        assert await self.end_of(stream_id) == pb.Ended()
        return self.messages[stream_id]


class ManyCall(Received):
    """A call over gRPC. Nothing is received while `may_read` is not set."""

    def __init__(self, generation: GenerationStub, metadata: Any = ()) -> None:
        super().__init__()
        self.call = generation.GenerateMany(metadata=metadata)
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def open(self, stream_id: int, request: pb.GenerateRequest | None = None, **opening: Any) -> None:
        await self.act(stream_id, open=pb.OpenStream(request=request, **opening))

    async def pause(self, stream_id: int) -> None:
        await self.act(stream_id, pause=pb.PauseStream())

    async def unpause(self, stream_id: int) -> None:
        await self.act(stream_id, **{"continue": pb.ContinueStream()})

    async def cancel(self, stream_id: int) -> None:
        await self.act(stream_id, cancel=pb.CancelStream())

    async def act(self, stream_id: int, **action: Any) -> None:
        await self.call.write(pb.GenerateManyRequest(stream_id=stream_id, **action))

    async def read(self) -> None:
        """Receives until the call ends. Raises AioRpcError if it fails."""
        while True:
            await self.may_read.wait()
            response = await self.call.read()
            if not isinstance(response, pb.GenerateManyResponse):
                return
            self.add(response)


@asynccontextmanager
async def many_call(generation: GenerationStub, metadata: Any = ()) -> AsyncIterator[ManyCall]:
    """Opens a call, reads it in a task, and cancels it in the end."""
    call = ManyCall(generation, metadata)
    reading = asyncio.create_task(call.read())
    try:
        yield call
    finally:
        call.call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reading


class DirectCall(Received):
    """A call without gRPC. `is_slow` keeps the write in progress until it is false."""

    def __init__(self, intake: Intake) -> None:
        super().__init__()
        self._requests: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()
        self.is_slow = False
        opener = StreamOpener(intake, Access(), read_fields, ANONYMOUS, "test")
        self.streams = ManyStreams(opener, LoopShare(), 60.0, 8192)
        self.task = asyncio.create_task(self.streams.serve(self._arriving(), self._write))

    def open(self, stream_id: int, request: pb.GenerateRequest, **opening: Any) -> None:
        self.act(stream_id, open=pb.OpenStream(request=request, **opening))

    def pause(self, stream_id: int) -> None:
        self.act(stream_id, pause=pb.PauseStream())

    def unpause(self, stream_id: int) -> None:
        self.act(stream_id, **{"continue": pb.ContinueStream()})

    def cancel(self, stream_id: int) -> None:
        self.act(stream_id, cancel=pb.CancelStream())

    def act(self, stream_id: int, **action: Any) -> None:
        self._requests.put_nowait(pb.GenerateManyRequest(stream_id=stream_id, **action))

    async def finish(self) -> None:
        """Sends no more requests, and waits for the end of the call."""
        self._requests.put_nowait(None)
        await asyncio.wait_for(self.task, 30)

    async def _arriving(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while (request := await self._requests.get()) is not None:
            yield pb.GenerateManyRequest.FromString(request.SerializeToString())

    async def _write(self, response: pb.GenerateManyResponse) -> None:
        data = response.SerializeToString()
        while self.is_slow:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        self.add(pb.GenerateManyResponse.FromString(data))


def code_of(ended: pb.Ended) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == ended.code)


def token_ids(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.delta.token_ids]


async def opened(served: Served, call: ManyCall, stream_id: int, **opening: Any) -> Submitted:
    """Opens a stream, and returns its request as the engine has it, started."""
    await call.open(stream_id, text_request(), **opening)
    return (await served.engine.next_request()).start()


async def status_of_call(served: Served, *requests: pb.GenerateManyRequest | bytes) -> grpc.aio.AioRpcError:
    """Returns the status of a call with these requests."""
    call = served.channel.stream_stream("/quire.v1.Generation/GenerateMany")()

    async def run() -> None:
        for request in requests:
            await call.write(request if isinstance(request, bytes) else request.SerializeToString())
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run()
    return caught.value
