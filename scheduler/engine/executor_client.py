"""The scheduler's side of the plan stream."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from scheduler.core import ExecutorLost, ExecutorNotOurs, PlanRejected, StepPlan, StepResult
from scheduler.engine import plan_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from scheduler.engine.step_trace import ExecutorTimings

T = TypeVar("T")

_OPTIONS = [
    # An http_proxy of the environment is for requests to other networks; gRPC would send calls to loopback there too.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Detects a peer that vanished without closing its connection in seconds; TCP would take minutes.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC waits this long for the acknowledgement of data as well; the default is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The engine decides when to reconnect, so gRPC's own backoff must not delay it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name, this bounds one attempt. On a busy machine a tenth of a second is not enough.
    ("grpc.min_reconnect_backoff_ms", 2_000),
]


class ExecutorClient:
    """Connects to the executor at one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = ExecutorStub(self._channel)

    async def describe(self, timeout_s: float) -> plan_wire.ExecutorDescription:
        """Returns the executor's description of itself. Raises ExecutorLost if no executor answers in time."""
        try:
            response = await self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise ExecutorLost(f"no executor at {self.address}: {error.details()}") from error
        return plan_wire.decode_description(response)

    def open_stream(self, on_arrival: Callable[[], None]) -> PlanStream:
        """Opens a new plan stream. `on_arrival` is called when a result has arrived or the stream has ended."""
        return PlanStream(self._stub.Run(), on_arrival)

    async def close(self) -> None:
        await self._channel.close()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result, the time of its arrival (time.monotonic_ns), and the durations that the executor reports."""

    result: StepResult
    received_ns: int
    timings: ExecutorTimings


class PlanStream:
    """Sends plans and receives results. Keeps results, and the error that ends the stream, until they are taken."""

    def __init__(
        self, call: grpc.aio.StreamStreamCall[pb.StepPlan, pb.StepResult], on_arrival: Callable[[], None]
    ) -> None:
        self._call = call
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
            await self._call.write(plan_wire.encode_plan(plan))
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
            async for message in self._call:
                result, timings = plan_wire.decode_result(message), plan_wire.decode_timings(message)
                self._arrivals.append(Arrival(result, time.monotonic_ns(), timings))
                self._on_arrival()
            self._error = ExecutorLost("the executor ended the plan stream")
        except grpc.aio.AioRpcError as error:
            code, details = self._first_status or (error.code(), error.details() or "")
            self._error = _blame(code, details)
        except ExecutorLost as error:  # an invalid result
            self._call.cancel()
            self._error = error
        except asyncio.CancelledError:  # the call was cancelled by `close`
            self._error = ExecutorLost("the plan stream was closed")
        self._on_arrival()

    def _keep_status(self, call: grpc.aio.StreamStreamCall[pb.StepPlan, pb.StepResult]) -> None:
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
            f"another scheduler has taken the executor ({details}): as long as both run, they take it from each "
            "other again and again; stop one of them, or give each an executor of its own"
        )
    return ExecutorLost(f"the plan stream broke ({code.name}): {details}")
