"""The gRPC service `quire.executor.v1.Executor`: moves messages between streams and the device thread."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc

from executor.device.device_thread import DeviceThread
from executor.device.work import Begin, EndOfPlans, Failure, FailureKind, LivenessProbe, Marker, Step
from executor.errors import EpochRefused, LeaseRefused, PlanRejected
from executor.plans import plan_wire
from executor.plans.limits import PlanLimits
from executor.plans.plan import Publication, StepOutput, StepPlan
from executor.plans.plan_size import check_size
from executor.stream.leases import Leases
from executor.stream.plan_session import PlanSession
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1 import executor_pb2_grpc
from quire.plan_stream import OWN
from quire.unexpected import unexpected

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]

_MAX_OPENINGS = 4
"""Number of streams that may wait for a lease at once. Each can hold one message of the largest size in memory."""

_OPENING_TIMEOUT_S = 10.0

_MAX_SCHEME = 10_000
"""Longest name of a digest scheme, in characters."""

_SHUTTING_DOWN = "the executor is shutting down"
_NO_OPENING = (
    "the stream does not begin with an opening: the scheduler speaks version 1 of the plan stream or an unknown one, "
    f"this executor {OWN}: run the same release of both"
)

_STATUS = {
    FailureKind.PLAN_REJECTED: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.EPOCH_REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    FailureKind.TAKEN_OVER: grpc.StatusCode.ABORTED,
    FailureKind.INTERNAL: grpc.StatusCode.INTERNAL,
    FailureKind.SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
}


class ExecutorServicer(executor_pb2_grpc.ExecutorServicer):
    """Serves plan streams. The stream that has the lease has the device."""

    def __init__(
        self,
        device: DeviceThread,
        limits: PlanLimits,
        description: pb.DescribeResponse,
        observe: Callable[[StepOutput], None],
        expect: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        """Calls `expect` with each plan that arrives, `observe` with the output of each step, on the event loop."""
        self._device = device
        self._limits = limits
        self._description = description
        self._observe = observe
        self._expect = expect
        self._leases = Leases(tuple(description.features))
        self._num_openings = 0
        self._streams: set[PlanSession] = set()
        self._is_shut_down = False

    async def Describe(  # noqa: N802  # the name of the rpc
        self,
        request: pb.DescribeRequest,
        context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse],
    ) -> pb.DescribeResponse:
        """Answers when the device thread reaches the request, so an executor that hangs does not answer."""
        loop, has_answered = asyncio.get_running_loop(), asyncio.Event()

        def answered() -> None:
            loop.call_soon_threadsafe(has_answered.set)

        self._device.put(LivenessProbe(answered))
        await has_answered.wait()
        return self._description

    async def Run(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunRequest], context: Context
    ) -> AsyncIterator[pb.RunResponse]:
        stream = PlanSession(asyncio.get_running_loop())
        self._streams.add(stream)
        reader: asyncio.Task[None] | None = None
        try:
            opening = await self._open(request_iterator, stream, context)
            if opening.digest_scheme:
                self._device.put(Begin(stream.epoch, opening.digest_scheme, stream.deliver))
            else:
                yield self._lease(stream.epoch, Publication())
            reader = asyncio.create_task(self._read_plans(request_iterator, stream))
            while not isinstance(outcome := await stream.outcome(), EndOfPlans):
                if isinstance(outcome, Failure):
                    await context.abort(_STATUS[outcome.kind], outcome.message)
                elif isinstance(outcome, Publication):
                    yield self._lease(stream.epoch, outcome)
                else:
                    self._observe(outcome)
                    yield pb.RunResponse(result=plan_wire.output_to_message(outcome))
        finally:
            if reader is not None:
                reader.cancel()
            self._streams.discard(stream)
            self._leases.release(stream)

    def shut_down(self) -> None:
        """Ends all streams. New streams end at once."""
        self._is_shut_down = True
        for stream in self._streams:
            stream.fail(FailureKind.SHUTDOWN, _SHUTTING_DOWN)

    def _lease(self, epoch: int, retained: Publication) -> pb.RunResponse:
        return pb.RunResponse(lease=plan_wire.lease_to_message(epoch, self._description.incarnation, retained))

    async def _open(self, messages: AsyncIterator[pb.RunRequest], stream: PlanSession, context: Context) -> pb.Opening:
        """Reads the opening and gives the stream the lease, or ends the call."""
        if self._is_shut_down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _SHUTTING_DOWN)
        if self._num_openings >= _MAX_OPENINGS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams wait for a lease")
        self._num_openings += 1
        try:
            async with asyncio.timeout(_OPENING_TIMEOUT_S):
                message = await anext(messages, pb.RunRequest())
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no opening within {_OPENING_TIMEOUT_S:g} s")
        finally:
            self._num_openings -= 1
        if not message.HasField("opening"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _NO_OPENING)
        if len(message.opening.digest_scheme) > _MAX_SCHEME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the name of the digest scheme is too long")
        try:
            self._leases.grant(message.opening, stream)
        except LeaseRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return message.opening

    async def _read_plans(self, messages: AsyncIterator[pb.RunRequest], stream: PlanSession) -> None:
        """Passes plans to the device thread until one is out of order or the scheduler has sent the last one.

        Failures pass through the device thread too, so that the results of earlier plans come first.
        """
        last: Failure | EndOfPlans = EndOfPlans()
        try:
            async for message in messages:
                arrived_ns = time.monotonic_ns()
                await stream.room()
                if not message.HasField("plan"):
                    raise PlanRejected("a message without a plan")
                check_size(message.plan, self._limits)
                plan = plan_wire.plan_from_message(message.plan)
                stream.check_order(plan)
                self._expect(plan)
                self._device.put(Step(plan, arrived_ns, stream.deliver))
        except PlanRejected as error:
            last = Failure(FailureKind.PLAN_REJECTED, str(error))
        except EpochRefused as error:
            last = Failure(FailureKind.EPOCH_REFUSED, str(error))
        except grpc.aio.AbortError:
            return  # the call has ended, so no end of the plans is awaited
        except Exception as error:  # noqa: BLE001  # such as MemoryError: this stream ends, and others may follow
            _log.exception("a plan could not be read")
            unexpected("plan")
            last = Failure(FailureKind.INTERNAL, f"a plan could not be read: {error!r}")
        self._device.put(Marker(last, stream.deliver))
