"""The clients of the simulated scheduler: the shipped asynchronous client, which resumes, on calls in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from quire.async_client import AsyncEventStream
from quire.errors import QuireError
from quire.events import Delta, Event, Finished, FinishReason, PromptLogprobs, Started, TokenLogprobs
from quire.tries import ServerContact, Tries
from quire.v1 import generation_pb2 as pb
from scheduler.identity.identity import CALLER, Identity, Role
from tests.simulation.requests import tenant_of

if TYPE_CHECKING:
    from tests.simulation.requests import Asked, Entry
    from tests.simulation.scheduler_host import SchedulerProcess
    from tests.simulation.transport import Status
    from tests.simulation.world import World

Code = grpc.StatusCode
ABSENT: Status = (Code.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused")
LOST: Status = (Code.UNAVAILABLE, "Socket closed")


@dataclass(eq=False)
class Client:
    """One client with one request. Keeps what it has received, over all calls."""

    world: World
    asked: Asked
    began_s: float = 0.0
    ended_s: float | None = None
    code: grpc.StatusCode | None = None
    details: str = ""
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[list[Entry]]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    scores: dict[int, float | None] = field(default_factory=dict)
    prompt_logprobs: list[list[Entry]] = field(default_factory=list)
    num_messages: int = 0
    num_started: int = 0
    num_calls: int = 0
    has_left: bool = False
    longest_stall_s: float = 0.0
    saw_no_core: bool = False
    is_cut_off: bool = False
    stream: AsyncEventStream | None = None

    @property
    def name(self) -> str:
        return self.asked.name

    async def run(self) -> None:
        """Arrives, is served, and ends."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.asked.arrives_s)
        self.began_s = loop.time()
        self.saw_no_core = self.world.has_no_core
        if self.asked.leaves_s is not None:
            loop.call_later(self.asked.leaves_s, self.leave)
        await self._read()
        self.ended_s = loop.time()
        self.saw_no_core |= self.world.has_no_core
        self.world.log(f"{self.name} ends: {self.code and self.code.name} {self.details}")
        self.world.oracles.call_ended(self)

    async def _read(self) -> None:
        contact = ServerContact(self.asked.resume_timeout_s)
        contact.has_answered = self.asked.knows_server
        arguments = {"timeout": self.asked.timeout_s, "wait_for_ready": self.asked.waits}
        tries = Tries(self.asked.message, arguments, contact)
        self.code = Code.OK
        try:
            self.stream = AsyncEventStream(self._begin_call, tries, contact)
            async for event in self.stream:
                self._receive(event)
        except QuireError as error:
            self.code, self.details = grpc.StatusCode[error.code], error.message
        except Exception as error:  # noqa: BLE001  # a bug of the client
            self.code, self.details = Code.UNKNOWN, f"{type(error).__name__}: {error}"
        if self.has_left:
            self.code = Code.CANCELLED
        self.world.num_resumptions += contact.num_resumptions

    def leave(self) -> None:
        """The client cancels its request."""
        if self.stream is not None and self.code is Code.OK and self.ended_s is None and not self.stream._closed:
            self.has_left = True
            self.stream.close()

    def _begin_call(self, request: pb.GenerateRequest, *, timeout: float | None, wait_for_ready: bool) -> Call:
        self.num_calls += 1
        if request.HasField("resume"):
            sequences = {each.index: len(each.token_ids) for each in request.resume.sequences}
            self.world.log(f"{self.name} resumes after {sequences}")
        return Call(self, request, timeout, waits=wait_for_ready)

    def _receive(self, event: Event) -> None:
        self.world.log(f"{self.name} receives {type(event).__name__}")
        problem = self.world.oracles.violated
        if isinstance(event, Started):
            self.num_started += 1
        elif not self.num_started:
            problem(f"{self.name} receives {event} before Started")
        match event:
            case Started() if self.num_started > 1:
                problem(f"{self.name} receives Started twice")
            case PromptLogprobs():
                if event.first_position != len(self.prompt_logprobs) + 1:
                    problem(f"{self.name} receives the log-probability of token {event.first_position} out of turn")
                self.prompt_logprobs += map(_entries, event.tokens)
            case Delta():
                if event.index in self.reasons:
                    problem(f"{self.name} receives tokens after the end of sequence {event.index}")
                self.token_ids.setdefault(event.index, []).extend(event.token_ids)
                self.texts[event.index] = self.texts.get(event.index, "") + event.text
                self.logprobs.setdefault(event.index, []).extend(map(_entries, event.logprobs))
            case Finished():
                if event.index in self.reasons:
                    problem(f"{self.name}: sequence {event.index} ends twice")
                self.reasons[event.index], self.scores[event.index] = event.reason, event.score
                self.world.oracles.usage(self, event)


def _entries(token: TokenLogprobs) -> list[Entry]:
    return [(each.token_id, each.logprob, each.rank) for each in (token.chosen, *token.top)]


class Call:
    """One call of Generate: what the client reads from, and the context of the real servicer."""

    def __init__(self, client: Client, request: pb.GenerateRequest, timeout_s: float | None, *, waits: bool) -> None:
        loop = asyncio.get_running_loop()
        self._client, self._request, self._world = client, request, client.world
        self._deadline_s = None if timeout_s is None else loop.time() + timeout_s
        self._arrived: deque[pb.GenerateResponse] = deque()
        self._changed = asyncio.Event()
        self._status: Status | None = None
        self._trailers: tuple[Any, ...] = ()
        self._is_cancelled = False
        self._serving: asyncio.Task[None] | None = None
        self._process: SchedulerProcess | None = None
        self._connecting = loop.create_task(self._connect(waits=waits), name=f"{client.name}'s connection")
        if timeout_s is not None:  # the client's timer and the server's come about when the engine's does
            loop.call_later(timeout_s + client.asked.number % 3 * 0.01, self.end, Code.DEADLINE_EXCEEDED, "too late")

    async def _connect(self, *, waits: bool) -> None:
        while waits and self._world.scheduler is None and self._status is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        process = self._process = self._world.scheduler
        if process is None:
            self.end(*ABSENT)
        elif self._status is None:
            process.calls[self] = None
            context = process.context.copy()
            self._serving = asyncio.get_running_loop().create_task(self._serve(process), context=context)
            self._serving.set_name(f"{self._client.name}'s call")

    async def _serve(self, process: SchedulerProcess) -> None:
        tenant = tenant_of(self._client.asked.number)
        CALLER.set(Identity(self._client.name, tenant, frozenset({Role.GENERATE})))
        try:
            if self._world.shares_calls:
                await process.shared_call().serve(self, self._request, tenant)
            else:
                await process.server.Generate(self._request, self)  # type: ignore[arg-type]
            self._answer(Code.OK, "")
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._answer(Code.CANCELLED, "the call was cancelled")
        except Exception as error:  # noqa: BLE001  # gRPC would answer with UNKNOWN
            self._answer(Code.UNKNOWN, f"{type(error).__name__}: {error}")

    def _answer(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call from the server's side."""
        self._serving = None
        self.end(code, details)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call for both sides. What has arrived can still be read; what is being written is lost."""
        if self._status is None:
            self._status = code, details
            self._changed.set()
            if self._process is not None:
                self._process.calls.pop(self, None)
            if self._serving is not None:
                self._serving.cancel()

    def break_off(self, server_notices_s: float) -> None:
        """Breaks the connection: the client notices it at once, and the server later."""
        self._client.is_cut_off = True
        serving, self._serving = self._serving, None
        self.end(*LOST)
        if serving is not None:
            asyncio.get_running_loop().call_later(server_notices_s, serving.cancel)

    # --- the client's end: the part of grpc.aio.UnaryStreamCall that the client uses ------------------------------

    async def read(self) -> Any:
        while not self._arrived:
            if self._status is not None:
                code, details = self._status
                if self._is_cancelled:
                    raise asyncio.CancelledError
                if code is Code.OK:
                    return grpc.aio.EOF
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*self._trailers), details)
            self._changed.clear()
            await self._changed.wait()
        return self._arrived.popleft()

    def cancel(self) -> None:
        self._arrived.clear()
        self._is_cancelled = True
        self.end(Code.CANCELLED, "")

    # --- the server's end: the part of grpc.aio.ServicerContext that the servicer uses ----------------------------

    def peer(self) -> str:
        return self._client.name

    def has_stalled(self, duration_s: float) -> None:
        """Called with a time for which the client takes no message."""
        self._client.longest_stall_s = max(duration_s, self._client.longest_stall_s)

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def time_remaining(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    async def write(self, message: pb.GenerateResponse) -> None:
        client, asked, random = self._client, self._client.asked, self._world.random
        if not self._world.shares_calls:  # in a shared call, an error of a client is none of the server
            self._world.faults.may_raise("client: write", lambda: client.name)
        read_s = random.expovariate(1 / asked.read_s) if asked.read_s else 0.0
        if client.num_messages == asked.stalls_at:
            read_s = asked.stall_s
        breaks = client.num_messages in asked.breaks_at and not self._world.faults.is_over
        client.num_messages += 1
        self.has_stalled(read_s)
        await asyncio.sleep(read_s)
        if self._status is None:
            self._arrived.append(pb.GenerateResponse.FromString(message.SerializeToString()))
            self._changed.set()
            if breaks:
                self._world.log(f"the connection of {client.name} breaks")
                self.break_off(self._world.notices_s())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[Any, ...] = ()) -> None:
        self._trailers = trailing_metadata
        self._answer(code, details)
        raise grpc.aio.AbortError(details)
