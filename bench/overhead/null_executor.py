"""An executor without a model: it implements the plan stream and answers at once, or after a delay.

    python -m bench.overhead.null_executor --vocab-size 1664      # prints `ready ADDRESS`, serves until it is ended

It exists to put load on the scheduler. It does not check plans, and its token ids are arbitrary. It computes a step for
all slots together, in numpy: a step of 512 sequences takes about 50 µs, little compared with the scheduler.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorServicer, add_ExecutorServicer_to_server
from quire.plan_stream import FEATURES, PROTOCOL_VERSION

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # A scheduler may send keepalive pings every few seconds, with or without plans in flight.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]
Slots = NDArray[np.int64]


class NullBatch:
    """The state of all slots: which of them sample in a step, and when their sequences end. Arrays are by slot."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_known = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int64)
        self._row_counts = np.zeros(num_slots, np.int64)
        self._max_total = np.zeros(num_slots, np.int64)
        self._has_ended = np.zeros(num_slots, np.bool_)

    def step(self, plan: pb.StepPlan) -> tuple[bytes, bytes]:
        """Applies a plan and returns token_ids and end_reasons of its StepResult."""
        self._apply(plan)
        rows = np.flatnonzero(self._row_counts)
        self._num_computed[rows] += self._row_counts[rows]
        samples = (self._num_computed == self._num_known) | self._has_ended
        samples &= self._row_counts > 0
        for fork in plan.forks:
            self._copy(fork.parent_slot, fork.child_slot)
            samples[fork.child_slot] = True
        return self._sample(np.flatnonzero(samples))

    def _apply(self, plan: pb.StepPlan) -> None:
        self._row_counts[np.frombuffer(plan.retired_slots, "<i4")] = 0
        for admission in plan.admissions:
            slot = admission.slot
            self._num_known[slot] = len(admission.token_ids) // 4
            self._num_computed[slot] = admission.num_computed_tokens
            self._max_total[slot] = admission.params.max_total_tokens
            self._row_counts[slot] = 0
            self._has_ended[slot] = False
        row_counts = np.frombuffer(plan.row_counts, "<i4").reshape(-1, 2)
        self._row_counts[row_counts[:, 0]] = row_counts[:, 1]

    def _copy(self, parent: int, child: int) -> None:
        for values in (self._num_known, self._num_computed, self._max_total):
            values[child] = values[parent]
        self._row_counts[child] = 1
        self._has_ended[child] = False

    def _sample(self, slots: Slots) -> tuple[bytes, bytes]:
        overrun = self._has_ended[slots]
        token_ids = (31 * slots + 17 * self._num_known[slots]) % self._vocab_size
        self._num_known[slots] += ~overrun
        ends = (self._num_known[slots] >= self._max_total[slots]) & ~overrun
        self._has_ended[slots[ends]] = True
        end_reasons = (ends * pb.END_REASON_LENGTH).astype(np.uint8).tobytes() if ends.any() else b""
        return token_ids.astype("<i4").tobytes(), end_reasons


class NullExecutor(ExecutorServicer):
    """An executor on a free port.

    step_s         duration of a step; the next one starts when it is done. 0: results are sent at once
    max_model_len  a quarter of the slots can have as many tokens at once
    """

    def __init__(
        self, vocab_size: int, num_slots: int = 1024, step_s: float = 0.0, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self._step_s = step_s
        self._num_slots = num_slots
        self._description = pb.DescribeResponse(
            incarnation="1",
            model_name="null",
            dtype="none",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=num_slots * max_model_len // BLOCK_SIZE // 4,
            max_num_seqs=num_slots,
            max_num_batched_tokens=16 * num_slots,
            device="none",
            protocol_version=PROTOCOL_VERSION,
            features=FEATURES,
        )
        self._num_leases = 0
        self._server = grpc.aio.server(options=OPTIONS)
        add_ExecutorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def serve(self) -> None:
        """Serves until it is cancelled."""
        await self._server.start()
        print(f"ready {self.address}", flush=True)
        await self._server.wait_for_termination()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802
        return self._description

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await anext(request_iterator)  # the opening; every scheduler gets a lease
        self._num_leases += 1
        lease = pb.Lease(epoch=self._num_leases, incarnation=self._description.incarnation)
        await context.write(pb.RunResponse(lease=lease))
        plans: asyncio.Queue[tuple[pb.StepPlan, int]] = asyncio.Queue()
        arrivals = asyncio.create_task(_queue_up(request_iterator, plans))
        try:
            await self._answer(plans, context)
        finally:
            arrivals.cancel()

    async def _answer(self, plans: "asyncio.Queue[tuple[pb.StepPlan, int]]", context: Any) -> None:
        batch = NullBatch(self._num_slots, self._description.vocab_size)
        done_ns = time.monotonic_ns()
        while True:
            plan, arrived_ns = await plans.get()
            started_ns = max(done_ns, arrived_ns)
            token_ids, end_reasons = batch.step(plan)
            if self._step_s:
                await asyncio.sleep(self._step_s - (time.monotonic_ns() - started_ns) / 1e9)
            timings = pb.StepTimings(idle_ns=started_ns - done_ns, queue_ns=started_ns - arrived_ns)
            done_ns = time.monotonic_ns()
            timings.forward_ns = done_ns - started_ns
            result = pb.StepResult(
                epoch=plan.epoch,
                step_id=plan.step_id,
                token_ids=token_ids,
                end_reasons=end_reasons,
                timings=timings,
            )
            await context.write(pb.RunResponse(result=result))


async def _queue_up(arriving: AsyncIterator[pb.RunRequest], plans: "asyncio.Queue[tuple[pb.StepPlan, int]]") -> None:
    async for request in arriving:
        plans.put_nowait((request.plan, time.monotonic_ns()))


async def _serve(arguments: argparse.Namespace) -> None:
    step_s = arguments.step_ms / 1e3
    await NullExecutor(arguments.vocab_size, arguments.num_slots, step_s, arguments.max_model_len).serve()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead.null_executor", description=__doc__)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--num-slots", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
