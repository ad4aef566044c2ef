"""The scheduler's side of a plan stream for tests: encodes plans and reads results."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire.executor.v1 import executor_pb2 as pb

if TYPE_CHECKING:
    import numpy as np

    from executor.plans.plan import StepPlan


def plan_message(plan: StepPlan) -> pb.StepPlan:
    return pb.StepPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        retired_slots=_bytes(plan.retired_slots),
        admissions=[
            pb.Admission(
                slot=admission.slot,
                token_ids=_bytes(admission.token_ids),
                num_computed_tokens=admission.num_computed_tokens,
                block_table=_bytes(admission.block_table),
                params=pb.SequenceParams(
                    temperature=admission.params.temperature,
                    top_k=admission.params.top_k,
                    top_p=admission.params.top_p,
                    min_p=admission.params.min_p,
                    seed=admission.params.seed,
                    eos_token_ids=_bytes(admission.params.eos_token_ids),
                    stop_token_ids=_bytes(admission.params.stop_token_ids),
                    max_total_tokens=admission.params.max_total_tokens,
                    min_total_tokens=admission.params.min_total_tokens,
                    allowed_token_ids=_bytes(admission.params.allowed_token_ids),
                    bias_token_ids=_bytes(admission.params.bias_token_ids),
                    bias_values=admission.params.bias_values.astype("<f4").tobytes(),
                    repetition_penalty=admission.params.repetition_penalty,
                    frequency_penalty=admission.params.frequency_penalty,
                    presence_penalty=admission.params.presence_penalty,
                    num_prompt_tokens=admission.params.num_prompt_tokens,
                    num_logprobs=admission.params.num_logprobs,
                    num_prompt_logprobs=admission.params.num_prompt_logprobs,
                    num_candidates=admission.params.num_candidates,
                    grammar=admission.params.grammar,
                ),
            )
            for admission in plan.admissions
        ],
        table_updates=_bytes(plan.table_updates),
        block_copies=_bytes(plan.block_copies),
        row_counts=_bytes(plan.row_counts),
        forks=[
            pb.Fork(parent_slot=fork.parent_slot, child_slot=fork.child_slot, seed=fork.seed) for fork in plan.forks
        ],
        branches=_bytes(plan.branches),
        published_blocks=_bytes(plan.published.blocks),
        published_digests=plan.published.digests,
        withdrawn_blocks=_bytes(plan.withdrawn_blocks),
    )


def _bytes(values: np.ndarray) -> bytes:
    return values.astype("<i4").tobytes()


async def read(call) -> pb.StepResult:
    """Returns the next result of a stream that has not ended."""
    response = await asyncio.wait_for(call.read(), 10)
    assert response is not grpc.aio.EOF
    return response.result
