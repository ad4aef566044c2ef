"""The fake executor behind real gRPC, for tests that start the scheduler as a process."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorServicer, add_ExecutorServicer_to_server
from quire.plan_stream import FEATURES, PROTOCOL_VERSION
from scheduler.core import Admission, FinishReason, Fork, Logprobs, SequenceParams, StepPlan
from scheduler.engine.plan_wire import pack, pack_floats, unpack
from tests.support.core.fake_executor import FakeExecutor

END_REASONS = {
    None: pb.END_REASON_UNSPECIFIED,
    FinishReason.EOS: pb.END_REASON_EOS,
    FinishReason.LENGTH: pb.END_REASON_LENGTH,
    FinishReason.STOP: pb.END_REASON_STOP,
}


class ExecutorService(ExecutorServicer):
    """Serves the fake executor. `step_s` is the duration of a step, so that a test can act in between."""

    def __init__(self, vocab_size: int, step_s: float = 0.001) -> None:
        self._description = pb.DescribeResponse(
            incarnation="1",
            model_name="fake",
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=2000,
            block_size=16,
            num_blocks=200,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            device="none",
            protocol_version=PROTOCOL_VERSION,
            features=FEATURES,
        )
        self._num_leases = 0
        self._step_s = step_s
        self._server = grpc.aio.server()
        add_ExecutorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802
        return self._description

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        assert (await anext(request_iterator)).HasField("opening")
        self._num_leases += 1
        epoch = self._num_leases
        await context.write(pb.RunResponse(lease=pb.Lease(epoch=epoch, incarnation=self._description.incarnation)))
        executor = FakeExecutor(200, 16, 8, 512, self._description.vocab_size, epoch)
        async for message in request_iterator:
            result = executor.execute(decode_plan(message.plan))
            await asyncio.sleep(self._step_s)
            reasons = bytes(END_REASONS[reason] for reason in result.end_reasons or ())
            sent = pb.StepResult(
                epoch=result.epoch,
                step_id=result.step_id,
                token_ids=pack(result.token_ids),
                end_reasons=reasons,
                logprobs=encode_logprobs(result.logprobs),
                prompt_logprobs=encode_logprobs(result.prompt_logprobs),
                candidates=encode_logprobs(result.candidates),
            )
            await context.write(pb.RunResponse(result=sent))


def encode_logprobs(logprobs: Logprobs | None) -> pb.Logprobs | None:
    if logprobs is None:
        return None
    return pb.Logprobs(
        token_ids=pack(logprobs.token_ids), values=pack_floats(logprobs.values), ranks=pack(logprobs.ranks)
    )


def decode_plan(message: pb.StepPlan) -> StepPlan:
    return StepPlan(
        epoch=message.epoch,
        step_id=message.step_id,
        retired_slots=unpack(message.retired_slots),
        admissions=[
            Admission(
                slot=admission.slot,
                token_ids=array("i", admission.token_ids).tolist(),
                num_prompt_tokens=admission.params.num_prompt_tokens,
                num_computed_tokens=admission.num_computed_tokens,
                block_table=unpack(admission.block_table),
                params=SequenceParams(
                    max_total_tokens=admission.params.max_total_tokens,
                    min_total_tokens=admission.params.min_total_tokens,
                    seed=admission.params.seed,
                    eos_token_ids=tuple(unpack(admission.params.eos_token_ids)),
                    stop_token_ids=tuple(unpack(admission.params.stop_token_ids)),
                    num_logprobs=admission.params.num_logprobs,
                    num_prompt_logprobs=admission.params.num_prompt_logprobs,
                    num_candidates=admission.params.num_candidates,
                ),
            )
            for admission in message.admissions
        ],
        table_updates=unpack(message.table_updates),
        block_copies=unpack(message.block_copies),
        row_counts=unpack(message.row_counts),
        branches=unpack(message.branches),
        forks=[Fork(fork.parent_slot, fork.child_slot, fork.seed) for fork in message.forks],
    )
