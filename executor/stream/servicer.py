"""The gRPC service `quire.executor.v1.Executor`: moves messages between streams and the device thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc

from executor.device.device_thread import DeviceThread, EndOfPlans, Failure, FailureKind, LivenessProbe, Marker, Step
from executor.errors import EpochRefused, PlanRejected
from executor.plans import plan_wire
from executor.plans.plan import StepOutput
from executor.stream.plan_session import PlanSession
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1 import executor_pb2_grpc

Describe = Callable[[int], pb.DescribeResponse]
"""Returns the description of this executor, given the highest epoch so far."""

_STATUS = {
    FailureKind.PLAN_REJECTED: grpc.StatusCode.INVALID_ARGUMENT,
    FailureKind.EPOCH_REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    FailureKind.TAKEN_OVER: grpc.StatusCode.ABORTED,
    FailureKind.INTERNAL: grpc.StatusCode.INTERNAL,
    FailureKind.SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
}


class ExecutorServicer(executor_pb2_grpc.ExecutorServicer):
    """Serves plan streams. The stream with the highest epoch has the device."""

    def __init__(self, device: DeviceThread, describe: Describe, observe: Callable[[StepOutput], None]) -> None:
        """Calls `observe` with the output of each step, on the event loop."""
        self._device = device
        self._describe = describe
        self._observe = observe
        self._last_epoch = 0
        self._active: PlanSession | None = None
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
        return self._describe(self._last_epoch)

    async def Run(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.StepPlan],
        context: grpc.aio.ServicerContext[pb.StepPlan, pb.StepResult],
    ) -> AsyncIterator[pb.StepResult]:
        stream = PlanSession(asyncio.get_running_loop())
        self._streams.add(stream)
        if self._is_shut_down:
            stream.fail(FailureKind.SHUTDOWN, "the executor is shutting down")
        reader = asyncio.create_task(self._read_plans(request_iterator, stream))
        try:
            while not isinstance(outcome := await stream.outcome(), EndOfPlans):
                if isinstance(outcome, Failure):
                    await context.abort(_STATUS[outcome.kind], outcome.message)
                self._observe(outcome)
                yield plan_wire.output_to_message(outcome)
        finally:
            reader.cancel()
            self._streams.discard(stream)
            if self._active is stream:
                self._active = None

    def shut_down(self) -> None:
        """Ends all streams. New streams end at once."""
        self._is_shut_down = True
        for stream in self._streams:
            stream.fail(FailureKind.SHUTDOWN, "the executor is shutting down")

    async def _read_plans(self, messages: AsyncIterator[pb.StepPlan], stream: PlanSession) -> None:
        """Passes plans to the device thread until one is out of order or the scheduler has sent the last one.

        Failures pass through the device thread too, so that the results of earlier plans come first.
        """
        last: Failure | EndOfPlans = EndOfPlans()
        try:
            async for message in messages:
                arrived_ns = time.monotonic_ns()
                await stream.room()
                plan = plan_wire.plan_from_message(message)
                stream.check_order(plan, self._last_epoch)
                self._take_over(stream)
                self._device.put(Step(plan, arrived_ns, stream.deliver))
        except PlanRejected as error:
            last = Failure(FailureKind.PLAN_REJECTED, str(error))
        except EpochRefused as error:
            last = Failure(FailureKind.EPOCH_REFUSED, str(error))
        self._device.put(Marker(last, stream.deliver))

    def _take_over(self, stream: PlanSession) -> None:
        """Gives the device to a stream that has sent a plan in order."""
        if self._active is not stream:
            if self._active is not None:
                self._active.fail(FailureKind.TAKEN_OVER, f"epoch {stream.epoch} took over")
            self._active = stream
            self._last_epoch = stream.epoch
