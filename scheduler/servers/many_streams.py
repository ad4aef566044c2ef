"""Serves one call of GenerateMany: many requests on one stream, with one message for all that is ready.

    requests ──► read: open, pause, continue, cancel ──► a task for each stream: Intake.open
    engine ────► ResponseStream ──► streams with news, in order of arrival ──► write: one message for many streams

There is one writer. It collects the news of all streams into a message and writes it; what arrives during the write is
part of the next message. A step of the engine is thus one message, and a slow client gets fewer and larger ones. On a
busy server the next message waits until the engine has had its time (`loop_share.py`), and the engine acts on the
results of a step while a message is made. Reading does not wait for writing, so that a client can always cancel.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire.unexpected import unexpected
from quire.v1 import generation_pb2 as pb
from scheduler.core import InvalidRequest, QueueFull, QuireError, Unavailable
from scheduler.requests.status import BadMessage
from scheduler.requests.write_timeout import WriteTimeout
from scheduler.servers.stream_of_many import StreamOfMany
from scheduler.telemetry.limits import STREAMS_OF_A_CALL, limited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Any

    from scheduler.servers.loop_share import LoopShare
    from scheduler.servers.stream_opener import StreamOpener

    Write = Callable[[pb.GenerateManyResponse], Awaitable[Any]]

log = logging.getLogger(__name__)

MAX_STREAMS = 8192
"""Maximum number of streams of a call, cancelled ones included until their tasks have ended. Nothing is read while
twice this number are open or wait for `ended` to be written."""

MAX_STREAMS_OF_A_MESSAGE = 256

STREAMS_AT_ONCE = 32
"""Number of streams after which the event loop does something else. They take about 0.3 ms: the results of the next
step do not wait for the whole message."""

MAX_BYTES = 1 << 16
"""Size after which a message is written. Its last part can exceed it: a slow stream's output is one message."""


class ManyStreams:
    """One call.

    opener             opens the streams
    share              time of the event loop in which the messages of all calls are made
    reader_timeout_s   time after which a client that accepts no message loses the call, and a paused stream ends
    """

    def __init__(self, opener: StreamOpener, share: LoopShare, reader_timeout_s: float, max_streams: int) -> None:
        self._opener = opener
        self._share = share
        self._reader_timeout_s = reader_timeout_s
        self._max_streams = max_streams
        self._streams: dict[int, StreamOfMany] = {}  # until `ended` is written or the client cancels
        self._tasks: set[asyncio.Task[None]] = set()
        self._listed: OrderedDict[StreamOfMany, None] = OrderedDict()  # streams with news, in order of arrival
        self._news = asyncio.Event()
        self._written = asyncio.Event()
        self._response = pb.GenerateManyResponse()  # being collected
        self._is_stopping = False

    async def serve(self, requests: AsyncIterator[pb.GenerateManyRequest | BadMessage], write: Write) -> None:
        """Returns when the client has sent its last request and all streams have ended. Cancels the rest on leaving.

        Raises InvalidRequest if the client breaks the protocol, ReaderStalled, and Unavailable after `stop`.
        """
        reading = asyncio.create_task(self._read(requests), name="requests of a call")
        reading.add_done_callback(lambda _: self._news.set())
        try:
            with WriteTimeout(self._reader_timeout_s) as timeout:
                while not self._is_over(reading):
                    await self._news.wait()
                    self._news.clear()
                    while self._listed:
                        response = await self._collected()
                        if response.messages:
                            timeout.begin_write()
                            await write(response)
                            timeout.end_write()
                        self._written.set()
        finally:
            for stream in list(self._streams.values()):
                self._forget(stream)
            tasks = {reading, *self._tasks}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def stop(self) -> None:
        """Ends the call with UNAVAILABLE when its last stream has ended."""
        self._is_stopping = True
        self._news.set()

    def _is_over(self, reading: asyncio.Task[None]) -> bool:
        if reading.done():
            reading.result()
            return not self._streams
        if self._is_stopping and not self._streams:
            raise Unavailable("the server is draining")
        return False

    # --- reading --------------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest | BadMessage]) -> None:
        """Acts on each request. Raises InvalidRequest or BadMessage if one makes no sense."""
        async for request in requests:
            self._act(request)
            while len(self._streams) >= 2 * self._max_streams:
                self._written.clear()
                await self._written.wait()

    def _act(self, request: pb.GenerateManyRequest | BadMessage) -> None:
        if isinstance(request, BadMessage):
            if request.first_number is None:
                raise request
            self._add(request.first_number).fail(InvalidRequest({"open": str(request)}))
            self._opener.counted()
            return
        action = request.WhichOneof("action")
        if action == "open":
            self._open(self._add(request.stream_id), request.open)
            return
        if action is None:
            raise InvalidRequest({"action": "is empty, or unknown to this server"})
        stream = self._streams.get(request.stream_id)
        if stream is None:  # it has ended meanwhile
            return
        if action == "pause":
            stream.pause(self._reader_timeout_s)
        elif action == "continue":
            stream.unpause()
        else:
            self._forget(stream)
            self._news.set()  # it may have been the last one of a call that ends
            if stream.task is not None:
                stream.task.cancel()

    def _add(self, stream_id: int) -> StreamOfMany:
        if stream_id in self._streams:
            raise InvalidRequest({"stream_id": f"{stream_id} is in use"})
        stream = self._streams[stream_id] = StreamOfMany(stream_id, self._list, self._new_message)
        return stream

    def _open(self, stream: StreamOfMany, opening: pb.OpenStream) -> None:
        if len(self._tasks) >= self._max_streams:
            limited(STREAMS_OF_A_CALL)
            self._opener.counted()
            stream.fail(QueueFull(f"{self._max_streams} streams of this call are open"))
            return
        stream.task = asyncio.create_task(self._run(stream, opening))
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)

    async def _run(self, stream: StreamOfMany, opening: pb.OpenStream) -> None:
        try:
            await self._opener.run(stream, opening)
        except QuireError as error:
            stream.fail(error)
        except Exception as error:
            log.exception("a request failed because of a bug")
            unexpected("request")
            stream.fail(error)

    def _forget(self, stream: StreamOfMany) -> None:
        del self._streams[stream.id]
        self._listed.pop(stream, None)
        stream.close()

    # --- writing --------------------------------------------------------------------------------------------------

    def _list(self, stream: StreamOfMany) -> None:
        """Called when a stream gets something to write."""
        if not self._listed:
            self._news.set()
        self._listed[stream] = None

    def _new_message(self, stream_id: int) -> pb.StreamMessage:
        message = self._response.messages.add()
        message.stream_id = stream_id
        return message

    async def _collected(self) -> pb.GenerateManyResponse:
        """Returns a message with the news of listed streams, in the order in which they were listed.

        A stream whose news do not fit is listed again, behind the others.
        """
        await self._share.turn()
        response = self._response = pb.GenerateManyResponse()
        num_streams = min(len(self._listed), MAX_STREAMS_OF_A_MESSAGE)
        num_left = MAX_BYTES
        while True:
            with self._share.work():
                num_left -= self._collect(min(num_streams, STREAMS_AT_ONCE), num_left)
            num_streams -= STREAMS_AT_ONCE
            if num_streams <= 0 or num_left <= 0:
                return response
            await asyncio.sleep(0)

    def _collect(self, max_streams: int, num_bytes: int) -> int:
        """Adds the news of some streams to the message. Returns their size, which can exceed `num_bytes`."""
        num_left = num_bytes
        while self._listed and max_streams > 0 and num_left > 0:
            stream, _ = self._listed.popitem(last=False)
            num_left -= stream.write(num_left)
            max_streams -= 1
            if stream.has_ended:
                self._forget(stream)
        return num_bytes - num_left
