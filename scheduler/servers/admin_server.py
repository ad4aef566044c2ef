"""`quire.v1.Admin` on grpc.aio: inspection and control for operators."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire.v1 import admin_pb2 as pb
from quire.v1.admin_pb2_grpc import AdminServicer
from scheduler.core import BlockState, QuireError
from scheduler.requests.status import abort
from scheduler.servers.read_budget import ReadBudget

if TYPE_CHECKING:
    from typing import Any

    from scheduler.core import BlockMap, SequenceView
    from scheduler.engine.engine import Engine
    from scheduler.engine.step_trace import StepTrace
    from scheduler.requests.intake import Intake

    Context = grpc.aio.ServicerContext[Any, Any]

BLOCK_STATES = {
    BlockState.FREE: pb.BLOCK_STATE_FREE,
    BlockState.CACHED: pb.BLOCK_STATE_CACHED,
    BlockState.ACTIVE: pb.BLOCK_STATE_ACTIVE,
}


class AdminServer(AdminServicer):
    """Answers all calls at once except Drain. Calls that show the model's state fail with UNAVAILABLE until an executor
    has described it.
    """

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._engine = engine
        self._intake = intake
        self._resumed = asyncio.Event()
        self.moves_streams = False
        """True while routers are asked to continue their streams elsewhere."""
        self._reads = ReadBudget()

    async def GetBlockMap(  # noqa: N802
        self, request: pb.GetBlockMapRequest, context: Context
    ) -> pb.GetBlockMapResponse:
        try:
            async with self._reads.turn():
                return self._block_map_message(self._engine.block_map(summary_only=request.summary_only))
        except QuireError as error:
            await abort(context, error)

    def _block_map_message(self, block_map: BlockMap) -> pb.GetBlockMapResponse:
        usage = block_map.usage
        return pb.GetBlockMapResponse(
            block_size=block_map.block_size,
            blocks=[
                pb.BlockInfo(
                    state=BLOCK_STATES[run.state], ref_count=run.ref_count, num_hits=run.num_hits, length=run.length
                )
                for run in block_map.blocks
            ],
            sequences=[self._sequence_info(sequence) for sequence in block_map.sequences],
            summary=pb.PoolSummary(
                num_free_blocks=usage.num_free_blocks,
                num_cached_blocks=usage.num_cached_blocks,
                num_active_blocks=usage.num_active_blocks,
                num_shared_blocks=usage.num_shared_blocks,
                num_used_slots=usage.num_used_token_slots,
                num_wasted_slots=usage.num_wasted_token_slots,
            ),
            num_running=block_map.num_running,
            num_waiting=block_map.num_waiting,
            num_waiting_prompt_tokens=block_map.num_waiting_prompt_tokens,
            step_id=block_map.step_id,
            num_preemptions=block_map.num_preemptions,
            num_cow_copies=block_map.num_cow_copies,
        )

    async def GetStepTrace(  # noqa: N802
        self, request: pb.GetStepTraceRequest, context: Context
    ) -> pb.GetStepTraceResponse:
        try:
            async with self._reads.turn():
                steps = [trace for trace in self._engine.traces if trace.planned_ns > request.after_ns]
                return pb.GetStepTraceResponse(steps=[step_trace_message(trace) for trace in steps])
        except QuireError as error:
            await abort(context, error)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802
        """Returns when all requests have ended. The server drains until Resume, even if the caller disconnects."""
        self.moves_streams |= request.move_streams
        drained = asyncio.create_task(self._engine.drain())
        resumed = asyncio.create_task(self._resumed.wait())
        try:
            await asyncio.wait({drained, resumed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            resumed.cancel()
        if resumed.done() and not resumed.cancelled():
            await context.abort(grpc.StatusCode.CANCELLED, "Resume has undone the draining")
        return pb.DrainResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:  # noqa: N802
        try:
            self._engine.resume()
        except QuireError as error:
            await abort(context, error)
        self.moves_streams = False
        self._resumed.set()  # ends the calls of Drain that still wait
        self._resumed = asyncio.Event()
        return pb.ResumeResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        try:
            num_blocks = self._engine.reset_prefix_cache()
            await self._engine.withdrawals.executed()
        except QuireError as error:
            await abort(context, error)
        return pb.ResetPrefixCacheResponse(num_blocks=num_blocks)

    def _sequence_info(self, sequence: SequenceView) -> pb.SequenceInfo:
        return pb.SequenceInfo(
            request_id=self._intake.client_request_id(sequence.request_id),
            index=sequence.index,
            slot=sequence.slot,
            num_tokens=sequence.num_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_table=sequence.block_table,
        )


def step_trace_message(trace: StepTrace) -> pb.StepTrace:
    """Converts the trace of one step to its message."""
    return pb.StepTrace(
        epoch=trace.epoch,
        step_id=trace.step_id,
        num_sequences=trace.num_sequences,
        num_tokens=trace.num_tokens,
        planned_ns=trace.planned_ns,
        sent_ns=trace.sent_ns,
        received_ns=trace.received_ns,
        committed_ns=trace.committed_ns,
        queue_ns=trace.timings.queue_ns,
        prepare_ns=trace.timings.prepare_ns,
        forward_ns=trace.timings.forward_ns,
        sample_ns=trace.timings.sample_ns,
        idle_ns=trace.timings.idle_ns,
        prepare_overlaps=trace.timings.prepare_overlaps,
        num_decodes=trace.num_decodes,
        num_decode_pairs=trace.num_decode_pairs,
        num_prefill_pairs=trace.num_prefill_pairs,
    )
