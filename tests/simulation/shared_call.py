"""The second door of the clients: one call of GenerateMany that carries the streams of all, as a gateway makes it."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING, Any

import grpc

from quire.status_details import TRAILER
from quire.v1 import generation_pb2 as pb
from scheduler.identity.identity import CALLER, DEFAULT_TENANT, Identity, Role
from scheduler.identity.verifier import Verifier
from scheduler.servers.arrivals import ROUTER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.simulation.clients import Call
    from tests.simulation.scheduler_host import SchedulerProcess
    from tests.simulation.world import World

Code = grpc.StatusCode
CODES = {code.value[0]: code for code in Code}
MAX_UNREAD = 2
"""Messages of a stream that its client has not taken. With more, the stream is paused until all are taken."""


class Credentials(Verifier):
    """Takes the credentials of a stream for the name of its tenant."""

    async def identify(self, authorization: str | None) -> Identity | None:
        return None if authorization is None else Identity("a client", authorization, frozenset({Role.GENERATE}))


class _Stream:
    """One stream at the client's end of the call.

    stalled_since_s  when it was paused, until the scheduler knows that it goes on
    """

    def __init__(self, call: Call) -> None:
        self.unread: deque[pb.StreamMessage] = deque()
        self.has_news = asyncio.Event()
        self.is_paused = False
        self.stalled_since_s: float | None = None
        self._call = call

    def receive(self, message: pb.StreamMessage) -> None:
        self.unread.append(message)
        self.has_news.set()

    def end_stall(self, now_s: float) -> None:
        """Notes how long the client has stalled, if it has."""
        if self.stalled_since_s is not None:
            self._call.has_stalled(now_s - self.stalled_since_s)
            self.stalled_since_s = None


class SharedCall:
    """One call to one scheduler process, and the context of the real servicer. Create it in a task of the process."""

    def __init__(self, world: World, process: SchedulerProcess) -> None:
        self._world = world
        self._streams: dict[int, _Stream] = {}
        self._last_id = 0
        self._unsent: deque[pb.GenerateManyRequest] = deque()
        self._has_unsent = asyncio.Event()
        self.has_ended = False
        self._task = asyncio.create_task(self._run(process), name="GenerateMany")

    @property
    def has_unsent(self) -> bool:
        """True while messages to the scheduler are on their way."""
        return not self.has_ended and bool(self._unsent)

    async def serve(self, call: Call, request: pb.GenerateRequest, tenant: str) -> None:
        """Serves a request as `GenerationServer.Generate` does, with `call` as its context."""
        opening = pb.OpenStream(request=request, client=call.peer(), authorization=tenant)
        if (left_s := call.time_remaining()) is not None:
            opening.timeout_ms = ceil(1e3 * left_s)
        self._last_id += 1
        number, stream = self._last_id, _Stream(call)
        self._streams[number] = stream
        self._send(pb.GenerateManyRequest(stream_id=number, open=opening))
        try:
            ended = await self._deliver(call, number, stream)
        finally:
            if self._streams.pop(number, None) is not None:
                self._send(pb.GenerateManyRequest(stream_id=number, cancel=pb.CancelStream()))
        if ended.code:
            trailers = ((TRAILER, ended.status_details),) if ended.status_details else ()
            await call.abort(CODES[ended.code], ended.message, trailers)

    async def _deliver(self, call: Call, number: int, stream: _Stream) -> pb.Ended:
        """Passes the messages of a stream on as its client takes them; returns its end."""
        while True:
            while stream.unread:
                message = stream.unread.popleft()
                if message.HasField("ended"):
                    stream.end_stall(self._world.now_s)
                    return message.ended
                await call.write(message.response)
            self._unpause(number, stream)
            stream.has_news.clear()
            await stream.has_news.wait()

    def _pause(self, number: int, stream: _Stream) -> None:
        if not stream.is_paused:
            stream.is_paused = True
            if stream.stalled_since_s is None:
                stream.stalled_since_s = self._world.now_s
            self._send(pb.GenerateManyRequest(stream_id=number, pause=pb.PauseStream()))

    def _unpause(self, number: int, stream: _Stream) -> None:
        if stream.is_paused:
            stream.is_paused = False
            message = pb.GenerateManyRequest(stream_id=number)
            getattr(message, "continue").SetInParent()  # the field has the name of a keyword
            self._send(message)

    def _send(self, message: pb.GenerateManyRequest) -> None:
        self._unsent.append(message)
        self._has_unsent.set()

    async def _run(self, process: SchedulerProcess) -> None:
        CALLER.set(Identity("the gateway", DEFAULT_TENANT, frozenset({Role.GENERATE})))
        try:
            with suppress(grpc.aio.AbortError):
                await process.server.GenerateMany(self._requests(), self)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - a bug, which must not end the world in silence
            self._world.oracles.violated(f"the call of all streams ends with an unexpected exception: {error!r}")
        self.has_ended = True
        for number, stream in list(self._streams.items()):
            ended = pb.Ended(code=Code.UNAVAILABLE.value[0], message="the call has ended")
            stream.receive(pb.StreamMessage(stream_id=number, ended=ended))

    async def _travel(self) -> None:
        """Waits until a message has arrived; meanwhile the other end goes on."""
        await asyncio.sleep(self._world.random.expovariate(1 / self._world.mean_delay_s))

    async def _requests(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while True:
            while self._unsent:
                await self._travel()
                message = self._unsent.popleft()
                stream = self._streams.get(message.stream_id)
                if stream is not None and message.WhichOneof("action") == "continue" and not stream.is_paused:
                    stream.end_stall(self._world.now_s)
                yield pb.GenerateManyRequest.FromString(message.SerializeToString())
            self._has_unsent.clear()
            await self._has_unsent.wait()

    # --- the part of grpc.aio.ServicerContext that the servicer uses ----------------------------------------------

    def peer(self) -> str:
        return "the gateway"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((ROUTER, "the gateway"),)

    async def write(self, response: pb.GenerateManyResponse) -> None:
        await self._travel()
        for message in response.messages:
            stream = self._streams.get(message.stream_id)
            if stream is None:  # it was cancelled
                continue
            if message.HasField("ended"):
                del self._streams[message.stream_id]
            stream.receive(message)
            if len(stream.unread) > MAX_UNREAD:
                self._pause(message.stream_id, stream)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[Any, ...] = ()) -> None:
        self._world.oracles.violated(f"the call of all streams ends: {code.name}: {details}")
        raise grpc.aio.AbortError(details)
