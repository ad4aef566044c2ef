"""The scheduler's side of the plan stream."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from quire.addresses import FILE
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from quire.plan_stream import FEATURES, LEAST_PROTOCOL_VERSION, OPTIONAL_FEATURES, PROTOCOL_VERSION
from quire.tls import watched_channel_credentials
from quire.unexpected import unexpected
from scheduler.core import ExecutorLost, ExecutorNotOurs, PlanRejected, ResultMismatch, StepPlan, StepResult
from scheduler.engine import plan_wire
from scheduler.engine.executor_channel import address_in, open_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from quire.tls import TlsFiles
    from scheduler.engine.step_trace import ExecutorTimings

    Call = grpc.aio.StreamStreamCall[pb.RunRequest, pb.RunResponse]

T = TypeVar("T")

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.2

_NOT_OURS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Statuses of a refusal for which an operator has to act."""


class ExecutorClient:
    """Connects to the executor at one address, or at the address in a file, which is read before each attempt.

    holder         name of this scheduler for people, which the executor tells other schedulers
    takes_over     takes the executor from another scheduler, once: after the first lease it asks like all others
    tls            the scheduler's certificate, read again before an attempt if it has changed; None: no TLS
    executor_name  subject alternative name that the executor's certificate must have
    """

    def __init__(
        self,
        address: str,
        *,
        holder: str = "",
        takes_over: bool = False,
        tls: TlsFiles | None = None,
        executor_name: str = "",
    ) -> None:
        """Raises TlsError."""
        self._place = address
        self.address = "" if address.startswith(FILE) else address
        self._holder = holder
        self._takes_over = takes_over
        self._instance = uuid.uuid4().hex
        self._latest_credentials = (lambda: None) if tls is None else watched_channel_credentials(tls)
        self._credentials: grpc.ChannelCredentials | None = None
        self._executor_name = executor_name
        self._channel: grpc.aio.Channel | None = None
        if self.address:
            self._connect()

    async def find(self, timeout_s: float) -> plan_wire.ExecutorDescription:
        """Returns the description of the executor at the address as it is now. To be called while no stream is open.

        Raises what `describe` raises, and ExecutorLost if the file that should hold the address cannot be used, or
        changes meanwhile.
        """
        path = self._place.removeprefix(FILE)
        address = self.address if path == self._place else address_in(path)
        if address != self.address or self._latest_credentials() is not self._credentials:
            await self.close()
            self.address = address
            self._connect()
        if path == self._place:
            return await self.describe(timeout_s)
        describing = asyncio.create_task(self.describe(timeout_s))
        try:
            while not (await asyncio.wait({describing}, timeout=_LOOK_INTERVAL_S))[0]:
                if address_in(path) != self.address:
                    raise ExecutorLost(f"the executor has left {self.address}")
            return describing.result()
        finally:
            describing.cancel()

    def _connect(self) -> None:
        self._credentials = self._latest_credentials()
        self._channel = open_channel(self.address, self._credentials, self._executor_name)
        self._stub = ExecutorStub(self._channel)

    async def describe(self, timeout_s: float) -> plan_wire.ExecutorDescription:
        """Returns the executor's description of itself.

        Raises ExecutorLost if no executor answers in time, and ExecutorNotOurs if it refuses to.
        """
        try:
            response = await self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_OURS:
                raise ExecutorNotOurs(f"the executor at {self.address} does not answer: {error.details()}") from error
            raise ExecutorLost(f"no executor at {self.address}: {error.details()}") from error
        return plan_wire.decode_description(response)

    async def open_stream(
        self,
        on_arrival: Callable[[], None],
        epoch: int,
        incarnation: str,
        timeout_s: float,
        *,
        digest_scheme: str = "",
        num_blocks: int = 0,
    ) -> PlanStream:
        """Gets the lease on the executor and returns its plan stream.

        on_arrival     called when a result has arrived or the stream has ended
        epoch          the core's epoch, which ends with this stream
        incarnation    of the executor that has described itself
        digest_scheme  asks for the blocks that were published under this name; empty: the executor retains none
        num_blocks     of the executor's pool, null block included, to check these blocks

        Raises ExecutorNotOurs if the executor gives no lease, and ExecutorLost if it does not answer or is not the one
        that has described itself.
        """
        call = self._stub.Run()
        opening = pb.Opening(
            protocol_version=PROTOCOL_VERSION,
            least_protocol_version=LEAST_PROTOCOL_VERSION,
            features=(*FEATURES, *OPTIONAL_FEATURES) if digest_scheme else FEATURES,
            digest_scheme=digest_scheme,
            holder=self._holder,
            instance=self._instance,
            takes_over=self._takes_over,
        )
        try:
            async with asyncio.timeout(timeout_s):
                answer = await _first_answer(call, opening)
            retained = plan_wire.decode_retained(answer.lease, num_blocks) if digest_scheme else None
        except TimeoutError:
            raise ExecutorLost(f"the executor at {self.address} has not answered for {timeout_s:g} s") from None
        except BaseException:
            call.cancel()
            raise
        if answer.lease.incarnation != incarnation:
            call.cancel()
            raise ExecutorLost(f"the executor at {self.address} was restarted while this scheduler connected")
        self._takes_over = False
        return PlanStream(call, on_arrival, epoch, answer.lease.epoch, retained)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


async def _first_answer(call: Call, opening: pb.Opening) -> pb.RunResponse:
    """Sends the opening, and returns the message with the lease. Raises ExecutorNotOurs, ExecutorLost."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(pb.RunRequest(opening=opening))
        answer = await call.read()
        if isinstance(answer, pb.RunResponse) and answer.HasField("lease"):
            return answer
    call.cancel()
    code, details = await call.code(), await call.details()
    if code in _NOT_OURS:
        raise ExecutorNotOurs(details)
    raise ExecutorLost(f"the executor gives no lease ({code.name}): {details}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result, the time of its arrival (time.monotonic_ns), and the durations that the executor reports."""

    result: StepResult
    received_ns: int
    timings: ExecutorTimings


class PlanStream:
    """Sends plans and receives results. Keeps results, and the error that ends the stream, until they are taken.

    epoch     the core's epoch. Its counterpart on the wire is the number of the executor's lease
    lease     that number
    retained  (block, digest) of the blocks that the executor has retained; None: it retains none
    """

    def __init__(
        self,
        call: Call,
        on_arrival: Callable[[], None],
        epoch: int,
        lease: int,
        retained: list[tuple[int, bytes]] | None = None,
    ) -> None:
        self._call = call
        self.retained = retained
        self._epoch = epoch
        self.lease = lease
        self._on_arrival = on_arrival
        self._arrivals: deque[Arrival] = deque()
        self._error: ExecutorLost | None = None
        # If a plan is being written while the stream ends, gRPC replaces the executor's status with INTERNAL
        # (grpc/grpc#36066). The first status of the call is the executor's.
        self._first_status: tuple[grpc.StatusCode, str] | None = None
        call.add_done_callback(self._keep_status)
        self._reader = asyncio.create_task(self._read(), name="plan stream reader")

    async def send(self, plan: StepPlan) -> None:
        """Sends a plan. Raises ExecutorLost if the stream has ended."""
        try:
            await self._call.write(pb.RunRequest(plan=plan_wire.encode_plan(plan, self.lease)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            # When the reader cancels the call because of an invalid result, grpc.aio cancels a write that is waiting.
            if isinstance(error, asyncio.CancelledError) and _task_is_being_cancelled():
                raise
            await self._reader
            raise self._error or ExecutorLost("the plan stream has ended") from error

    def take(self) -> Arrival | None:
        """Returns the next result, or None if there is none yet. Raises ExecutorLost when the stream has ended and all
        results have been taken."""
        if self._arrivals:
            return self._arrivals.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def close(self) -> None:
        self._call.cancel()
        await self._reader

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), pb.RunResponse):
                if message.result.epoch != self.lease:
                    raise ResultMismatch(f"a result of lease {message.result.epoch} under lease {self.lease}")
                result = plan_wire.decode_result(message.result, self._epoch)
                timings = plan_wire.decode_timings(message.result)
                self._arrivals.append(Arrival(result, time.monotonic_ns(), timings))
                self._on_arrival()
            self._error = ExecutorLost("the executor ended the plan stream")
        except grpc.aio.AioRpcError as error:
            code, details = self._first_status or (error.code(), error.details() or "")
            self._error = _blame(code, details)
        except ExecutorLost as error:  # an invalid result
            self._call.cancel()
            self._error = error
        except Exception as error:
            log.exception("a result could not be read")
            unexpected("result")
            self._call.cancel()
            self._error = ExecutorLost(f"a result could not be read: {error!r}")
        except asyncio.CancelledError:  # the call was cancelled by `close`
            self._error = ExecutorLost("the plan stream was closed")
        self._on_arrival()

    def _keep_status(self, call: Call) -> None:
        self._first_status = (_run_now(call.code()), _run_now(call.details()))


def _task_is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _run_now(coroutine: Coroutine[None, None, T]) -> T:
    """Runs a coroutine that never suspends and returns its result. A task would run too late: the status may change."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("the coroutine has suspended")


def _blame(code: grpc.StatusCode, details: str) -> ExecutorLost:
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
        return PlanRejected(f"the executor refused a plan: {details}")
    if code is grpc.StatusCode.ABORTED:
        return ExecutorNotOurs(
            f"another scheduler has taken the executor ({details}): this one waits until that one has ended"
        )
    return ExecutorLost(f"the plan stream broke ({code.name}): {details}")
