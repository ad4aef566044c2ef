"""An executor client without gRPC: a fake executor that answers on the event loop and can be made to fail."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from scheduler.core import ExecutorLost, ExecutorNotOurs, StepPlan, StepResult
from scheduler.engine.executor_client import Arrival
from scheduler.engine.plan_wire import ExecutorDescription
from scheduler.engine.step_trace import ExecutorTimings
from tests.support.core.fake_executor import FakeExecutor

DESCRIPTION = ExecutorDescription(
    model_name="fake",
    dtype="float32",
    device="none",
    vocab_size=50,
    max_model_len=200,
    block_size=4,
    num_blocks=101,
    max_num_seqs=16,
    max_num_batched_tokens=64,
)


class FakeClient:
    """Replaces `ExecutorClient`; a test sets its attributes to make the executor fail.

    is_up       False: there is no executor
    is_hanging  the executor does not answer
    alter       changes each result before it arrives
    refusal     why the executor gives no lease; empty: it gives one
    step_s      seconds that each step takes, one after the other
    num_probes  how often the executor was asked to describe itself
    retention   the digest scheme and the size of the pool with which the last stream was opened
    retained    what the executor has retained; None: it retains nothing
    """

    def __init__(self, description: ExecutorDescription = DESCRIPTION) -> None:
        self.description = description
        self.is_up = True
        self.is_hanging = False
        self.alter: Callable[[StepResult], StepResult] = lambda result: result
        self.refusal = ""
        self.step_s = 0.0
        self.num_streams = 0
        self.num_probes = 0
        self.stream: FakeStream | None = None
        self.retention: dict[str, object] = {}
        self.retained: list[tuple[int, bytes]] | None = None

    async def find(self, timeout_s: float) -> ExecutorDescription:
        return await self.describe(timeout_s)

    async def describe(self, timeout_s: float) -> ExecutorDescription:
        await asyncio.sleep(0)
        if not self.is_up:
            raise ExecutorLost("no executor there")
        self.num_probes += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_hanging:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise ExecutorLost("no answer") from None
        return self.description

    async def open_stream(
        self, on_arrival: Callable[[], None], epoch: int, incarnation: str, timeout_s: float, **retention: object
    ) -> "FakeStream":
        if self.refusal:
            raise ExecutorNotOurs(self.refusal)
        self.num_streams += 1
        self.retention = retention
        self.stream = FakeStream(self, on_arrival, epoch, self.num_streams)
        return self.stream

    def lose(self) -> None:
        """Cuts the open stream."""
        assert self.stream is not None
        self.stream.end(ExecutorLost("cut"))


class FakeStream:
    def __init__(self, client: FakeClient, on_arrival: Callable[[], None], epoch: int, lease: int) -> None:
        description = client.description
        self.lease = lease
        self.retained = client.retained
        self._client = client
        self._on_arrival = on_arrival
        self._results: deque[Arrival] = deque()
        self._error: ExecutorLost | None = None
        self.plans: list[StepPlan] = []
        self._free_s = 0.0  # when all steps so far are done
        self.executor = FakeExecutor(
            description.num_blocks,
            description.block_size,
            description.max_num_seqs,
            description.max_num_batched_tokens,
            description.vocab_size,
            epoch,
            retains=self.retained is not None,
        )

    async def send(self, plan: StepPlan) -> None:
        if self._error:
            raise self._error
        self.plans.append(plan)
        if not self._client.is_hanging:
            result = self.executor.execute(plan)
            loop = asyncio.get_running_loop()
            if self._client.step_s:
                self._free_s = max(self._free_s, loop.time()) + self._client.step_s
                loop.call_at(self._free_s, self._arrive, result)
            else:
                loop.call_soon(self._arrive, result)

    def take(self) -> Arrival | None:
        if self._results:
            return self._results.popleft()
        if self._error:
            raise self._error
        return None

    def end(self, error: ExecutorLost) -> None:
        self._error = error
        self._on_arrival()

    async def close(self) -> None:
        self._error = self._error or ExecutorLost("closed")

    def _arrive(self, result: StepResult) -> None:
        if not self._error:
            timings = ExecutorTimings(forward_ns=int(self._client.step_s * 1e9))
            self._results.append(Arrival(self._client.alter(result), time.monotonic_ns(), timings))
            self._on_arrival()
