"""Calls in memory, with the interface and the habits of grpc.aio, between an executor and its schedulers.

A wire delays messages, stalls, and breaks. Messages of one direction of a stream keep their order; streams do not wait
for each other. When a wire breaks, either end may notice it long before the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from quire.executor.v1 import executor_pb2 as pb
from tests.simulation.processes import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from random import Random

    from executor.stream.servicer import ExecutorServicer

WINDOW = 4  # messages of one direction that may be unread before the sender waits
Status = tuple[grpc.StatusCode, str]
BROKEN: Status = (grpc.StatusCode.UNAVAILABLE, "the connection broke")


class Closed(Exception):
    """The pipe was closed."""


class Pipe:
    """One direction of a stream."""

    def __init__(self, wire: Wire, ended: Callable[[Status], None] = lambda status: None) -> None:
        self._wire = wire
        self._ended = ended
        self._sent: deque[tuple[float, bytes | Status]] = deque()
        self._arrived: deque[bytes | Status] = deque()
        self._changed = asyncio.Event()
        self._last_s = 0.0
        self.is_closed = False

    async def send(self, data: bytes) -> None:
        """Raises Closed if the pipe was closed, also while the sender waits."""
        while not self.is_closed and len(self._sent) + len(self._arrived) >= WINDOW:
            self._changed.clear()
            await self._changed.wait()
        if self.is_closed:
            raise Closed
        self._put(data)

    def end(self, status: Status) -> None:
        """Sends the last item: a status."""
        if not self.is_closed:
            self._put(status)

    async def receive(self) -> bytes | Status:
        """Returns the next message, or the status, which stays. Raises Closed if the pipe was closed without one."""
        while not self._arrived:
            if self.is_closed:
                raise Closed
            self._changed.clear()
            await self._changed.wait()
        if isinstance(item := self._arrived[0], bytes):
            self._arrived.popleft()
            self._changed.set()
        return item

    def close(self, status: Status | None = None) -> None:
        """Drops what is under way. `status`: the receiver finds it after the messages that have arrived."""
        if not self.is_closed:
            self.is_closed = True
            self._sent.clear()
            if status is not None:
                self._arrived.append(status)
                self._ended(status)
            self._changed.set()

    def _put(self, item: bytes | Status) -> None:
        now_s = asyncio.get_running_loop().time()
        self._last_s = max(self._last_s, now_s + self._wire.delay_s())
        self._sent.append((self._last_s, item))
        asyncio.get_running_loop().call_at(self._last_s, self._arrive, context=OUTSIDE)

    def _arrive(self) -> None:
        loop = asyncio.get_running_loop()
        if self._wire.stalled_until_s > loop.time():
            loop.call_at(self._wire.stalled_until_s, self._arrive, context=OUTSIDE)
            return
        while self._sent and self._sent[0][0] <= loop.time() + 1e-9:
            item = self._sent.popleft()[1]
            if isinstance(item, bytes):
                self._arrived.append(item)
                self._changed.set()
            else:
                self.close(item)


class Wire:
    """A connection from one scheduler to the executor's address. `server` returns the process that listens there."""

    def __init__(self, random: Random, mean_delay_s: float, server: Callable[[], ExecutorServicer | None]) -> None:
        self._random = random
        self._mean_delay_s = mean_delay_s
        self.server = server
        self.stalled_until_s = 0.0
        self.is_cut = False
        self.calls: dict[Call, None] = {}
        self.on_response: Callable[[pb.RunResponse], bytes] = pb.RunResponse.SerializeToString

    def delay_s(self) -> float:
        return self._random.expovariate(1 / self._mean_delay_s)

    def stall(self, duration_s: float) -> None:
        self.stalled_until_s = asyncio.get_running_loop().time() + duration_s

    def break_calls(self, client_notices_s: float = 0.0, server_notices_s: float = 0.0) -> None:
        """Breaks the calls that are open. Calls that begin later use another connection."""
        loop = asyncio.get_running_loop()
        for call in list(self.calls):
            call.up.is_closed = call.down.is_closed = True
            loop.call_later(client_notices_s, call.lose_server, context=OUTSIDE)
            loop.call_later(server_notices_s, call.lose_client, context=OUTSIDE)

    # --- the part of grpc.aio.Channel that stubs use

    def unary_unary(self, path: str, **codecs: Any) -> Callable[..., Any]:
        return self._describe

    def stream_stream(self, path: str, **codecs: Any) -> Callable[[], Call]:
        return self.begin_stream

    def begin_stream(self) -> Call:
        return Call(self)

    async def close(self) -> None:
        self.break_calls()

    async def _describe(self, request: pb.DescribeRequest, timeout: float, wait_for_ready: bool) -> pb.DescribeResponse:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(timeout):
                while self.is_cut or (server := self.server()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await self._travel()
                context = ServerContext()
                response = await server.Describe(request, context)  # type: ignore[arg-type]
                await self._travel()
        except TimeoutError:
            raise error_of((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")) from None
        if self.is_cut or self.server() is not server:
            raise error_of(BROKEN)
        return pb.DescribeResponse.FromString(response.SerializeToString())

    async def _travel(self) -> None:
        await asyncio.sleep(self.delay_s())
        while (rest_s := self.stalled_until_s - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(rest_s)


class ServerContext:
    """The part of grpc.aio.ServicerContext that the executor uses."""

    status: Status = (grpc.StatusCode.OK, "")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        self.status = (code, details)
        raise grpc.aio.AbortError(details)


class Call:
    """A plan stream: the part of grpc.aio.StreamStreamCall that the scheduler uses, and the task of the servicer."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._status: Status | None = None
        self._has_status = asyncio.Event()
        self._callbacks: list[Callable[[Call], None]] = []
        self.up, self.down = Pipe(wire), Pipe(wire, self._end)
        self._server: asyncio.Task[None] | None = None
        wire.calls[self] = None
        later = asyncio.get_running_loop().call_later(wire.delay_s(), self._start, context=OUTSIDE)
        self._starting: asyncio.TimerHandle | None = later

    # --- the client's end -----------------------------------------------------------------------------------------

    async def write(self, message: pb.RunRequest) -> None:
        if self._status is None:
            with suppress(Closed):
                await self.up.send(message.SerializeToString())
                return
            if self._status is None:  # the connection broke, and this end has not noticed it yet
                await self._has_status.wait()
        status = self._status or BROKEN
        if status[0] is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if len(status[1]) % 2:
            raise asyncio.InvalidStateError("RPC already finished.")
        raise error_of((grpc.StatusCode.INTERNAL, "internal error from core"))  # grpc/grpc#36066

    async def read(self) -> Any:
        if self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        try:
            item = await self.down.receive()
        except Closed:  # broken, and not noticed yet; or cancelled
            await self._has_status.wait()
            item = self._status or BROKEN
        except asyncio.CancelledError:  # grpc.aio cancels a call whose reader is cancelled
            if not self._wire.is_cut:
                self.cancel()
            raise
        if isinstance(item, bytes):
            try:
                return pb.RunResponse.FromString(item)
            except Exception:  # noqa: BLE001  # gRPC logs an error, and returns this
                return None
        if item[0] is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if item[0] is grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise error_of(item)

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        asyncio.get_running_loop().call_later(self._wire.delay_s(), self.lose_client, context=OUTSIDE)
        self.down.close((grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        self.lose_server()
        return True

    async def code(self) -> grpc.StatusCode:
        await self._has_status.wait()
        return (self._status or BROKEN)[0]

    async def details(self) -> str:
        await self._has_status.wait()
        return (self._status or BROKEN)[1]

    def add_done_callback(self, callback: Callable[[Call], None]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def lose_server(self) -> None:
        """The client's end notices that the connection broke, unless the call has ended already."""
        if self._status is None:
            self.down.is_closed = False
            self.down.close(BROKEN)

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self._has_status.set()
            self.up.close()
            self._wire.calls.pop(self, None)
            for callback in self._callbacks:
                callback(self)

    # --- the server's end -----------------------------------------------------------------------------------------

    def lose_client(self) -> None:
        """The server's end notices that the connection broke, or that the client has cancelled the call."""
        if self._starting is not None:
            self._starting.cancel()
        self.up.close()
        if self._server is not None:
            self._server.cancel()

    def _start(self) -> None:
        self._starting, server = None, self._wire.server()
        if self._wire.is_cut or server is None:
            self.down.close(BROKEN)
        elif not self.down.is_closed:
            self._server = asyncio.get_running_loop().create_task(self._serve(server), name="executor's call")

    async def _serve(self, servicer: ExecutorServicer) -> None:
        context = ServerContext()
        try:
            async for response in servicer.Run(self._requests(), context):  # type: ignore[arg-type]
                await self.down.send(self._wire.on_response(response))
        except grpc.aio.AbortError:
            pass
        except Closed:
            return
        except Exception as error:  # noqa: BLE001  # as in grpc.aio
            context.status = (grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}")
        self.down.end(context.status)

    async def _requests(self) -> AsyncIterator[pb.RunRequest]:
        with suppress(Closed):
            while isinstance(data := await self.up.receive(), bytes):
                yield pb.RunRequest.FromString(data)


def error_of(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status[0], grpc.aio.Metadata(), grpc.aio.Metadata(), details=status[1])
