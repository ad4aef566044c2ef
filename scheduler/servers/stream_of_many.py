"""One stream of a call of GenerateMany: its messages, and whether they may be sent now."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from quire.unexpected import unexpected
from scheduler.core import QuireError
from scheduler.requests.status import ReaderStalled, RpcStatus, status_of
from scheduler.telemetry.limits import STALLED_READERS, limited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire.v1 import generation_pb2 as pb
    from scheduler.requests.response_stream import ResponseStream

log = logging.getLogger(__name__)

_OK = RpcStatus(grpc.StatusCode.OK, "", ())


class StreamOfMany:
    """A stream. It calls `on_news` with itself when it has something to write, and not again before `write`.

    new_message  adds an empty message of a stream, by its id, to the message of the call
    task         runs the request
    has_ended    `ended` was written
    done         its result is set when the request need not run on
    """

    __slots__ = (
        "_is_closed",
        "_is_listed",
        "_is_paused",
        "_new_message",
        "_on_news",
        "_output",
        "_rest",
        "_status",
        "_timer",
        "done",
        "has_ended",
        "id",
        "task",
    )

    def __init__(
        self, stream_id: int, on_news: Callable[[StreamOfMany], None], new_message: Callable[[int], pb.StreamMessage]
    ) -> None:
        self.id = stream_id
        self.task: asyncio.Task[None] | None = None
        self.has_ended = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_news = on_news
        self._new_message = new_message
        self._output: ResponseStream | None = None
        self._rest: Iterator[pb.GenerateResponse] | None = None  # messages that did not fit
        self._status: RpcStatus | None = None
        self._is_listed = self._is_paused = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None  # while it is paused

    def follow(self, output: ResponseStream) -> None:
        """Sends the messages of the request that was admitted."""
        self._output = output
        output.follow(self._list_output)

    def fail(self, error: BaseException) -> None:
        """Ends the stream with the status of an error."""
        self.end(status_of(error))

    def end(self, status: RpcStatus) -> None:
        """Ends the stream with this status, also if it is paused. Output that was not written is dropped."""
        if self._status is None and not self._is_closed:
            self._status = status
            self._rest = None
            self._finish()
            self._list()

    def pause(self, limit_s: float) -> None:
        """Writes nothing until `unpause`. Ends the stream if that takes longer than `limit_s`."""
        if not self._is_paused:
            self._is_paused = True
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._stall, limit_s)

    def unpause(self) -> None:
        self._is_paused = False
        self._stop_timer()
        if self._rest is not None or (self._output is not None and self._output.has_news):
            self._list()

    def close(self) -> None:
        """Called when nothing more may be written."""
        self._is_closed = True
        self._rest = None
        self._stop_timer()
        self._finish()

    def write(self, num_bytes: int) -> int:
        """Writes what is ready, and stops after `num_bytes`: the rest follows when it is called again.

        Returns the number of bytes written.
        """
        self._is_listed = False
        if self._is_closed:
            return 0
        if self._status is not None:
            return self._write_end(self._status)
        if self._is_paused or self._output is None:
            return 0
        if self._rest is None:
            self._rest = self._output.take(self._new_response)
        num_written = 0
        try:
            for response in self._rest:
                num_written += response.ByteSize()
                if num_written >= num_bytes:
                    self._list()
                    return num_written
        except QuireError as error:
            return num_written + self._write_end(status_of(error))
        except Exception as error:
            log.exception("a stream failed because of a bug")
            unexpected("request")
            return num_written + self._write_end(status_of(error))
        self._rest = None
        if self._output.has_ended:
            return num_written + self._write_end(_OK)
        if self._output.has_news:
            self._list()
        return num_written

    def _new_response(self) -> pb.GenerateResponse:
        return self._new_message(self.id).response

    def _write_end(self, status: RpcStatus) -> int:
        self.has_ended = True
        message = self._new_message(self.id)
        ended = message.ended
        ended.code = status.code.value[0]
        ended.message = status.message
        ended.status_details = b"".join(value for _, value in status.trailers)
        return message.ByteSize()

    def _list_output(self) -> None:
        if not self._is_paused:
            self._list()

    def _list(self) -> None:
        if not self._is_listed and not self._is_closed:
            self._is_listed = True
            self._on_news(self)

    def _stall(self, limit_s: float) -> None:
        limited(STALLED_READERS)
        self.fail(ReaderStalled(f"the stream was paused for longer than {limit_s} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
