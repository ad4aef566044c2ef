"""Translates plans and reports between the executor's types and the core's, which the fake executor takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from executor.plans.plan import Logprobs, Publication, StepPlan
from quire.plan_stream import DIGEST_BYTES
from scheduler.core import Admission, Fork, SequenceParams
from scheduler.core import StepPlan as CorePlan

if TYPE_CHECKING:
    from scheduler.core import Logprobs as CoreLogprobs


def seed_under(digest: str, seed: int) -> int:
    """Returns the seed that stands for sampling with this seed from the weights with this digest."""
    return seed ^ (int(digest) << 20)


def core_plan(plan: StepPlan, digest: str) -> CorePlan:
    return CorePlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        retired_slots=plan.retired_slots.tolist(),
        admissions=[
            Admission(
                slot=each.slot,
                token_ids=each.token_ids.tolist(),
                num_prompt_tokens=each.params.num_prompt_tokens,
                num_computed_tokens=each.num_computed_tokens,
                block_table=each.block_table.tolist(),
                params=SequenceParams(
                    max_total_tokens=each.params.max_total_tokens,
                    min_total_tokens=each.params.min_total_tokens,
                    seed=seed_under(digest, each.params.seed),
                    eos_token_ids=tuple(each.params.eos_token_ids.tolist()),
                    stop_token_ids=tuple(each.params.stop_token_ids.tolist()),
                    num_logprobs=each.params.num_logprobs,
                    repetition_penalty=each.params.repetition_penalty,
                    frequency_penalty=each.params.frequency_penalty,
                    presence_penalty=each.params.presence_penalty,
                    num_prompt_logprobs=each.params.num_prompt_logprobs,
                    num_candidates=each.params.num_candidates,
                ),
            )
            for each in plan.admissions
        ],
        table_updates=plan.table_updates.ravel().tolist(),
        block_copies=plan.block_copies.ravel().tolist(),
        row_counts=plan.row_counts.ravel().tolist(),
        forks=[Fork(each.parent_slot, each.child_slot, seed_under(digest, each.seed)) for each in plan.forks],
        branches=plan.branches.ravel().tolist(),
        published=published(plan.published),
        withdrawn_blocks=plan.withdrawn_blocks.tolist(),
    )


def published(publication: Publication) -> dict[int, bytes]:
    digests = publication.digests
    return {
        block: digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
        for place, block in enumerate(publication.blocks.tolist())
    }


def reported(logprobs: CoreLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    ranks = np.array(logprobs.ranks, np.int32) if logprobs.ranks else None
    return Logprobs(np.array(logprobs.token_ids, np.int32), np.array(logprobs.values, np.float32), ranks)
