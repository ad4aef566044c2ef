"""Bounds on the size of plans: no valid plan exceeds them, and they follow from the limits of the executor."""

from __future__ import annotations

from dataclasses import replace

import grpc
import numpy as np
import pytest

from executor.errors import PlanRejected
from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, Fork, Publication, SequenceParams, StepPlan
from executor.plans.plan_size import MAX_LISTED_TOKENS, check_size, max_message_bytes
from quire.executor.v1 import executor_pb2 as pb
from quire.grammars import MAX_GRAMMAR_BYTES
from quire.plan_stream import DIGEST_BYTES
from scheduler.requests.limits import RequestLimits
from tests.support.executor.fake_runner import LIMITS
from tests.support.executor.messages import plan_message
from tests.support.executor.served import open_stream, plan, status

LARGE = PlanLimits(
    vocab_size=151_936, max_model_len=131_072, block_size=16, num_blocks=40_000, max_num_seqs=256,
    max_num_batched_tokens=8192,
)  # fmt: skip


def full(count: int, value: int = 2**31 - 1) -> np.ndarray:
    return np.full(count, value, dtype=np.int32)


@pytest.mark.parametrize("limits", [LIMITS, LARGE, replace(LIMITS, vocab_size=2, num_blocks=2)])
def test_the_largest_plan_is_accepted_and_no_larger_one_makes_sense(limits: PlanLimits) -> None:
    num_slots, num_blocks = limits.max_num_seqs, limits.max_blocks_per_seq
    listed = full(MAX_LISTED_TOKENS)
    params = SequenceParams(
        *(2**32 - 1, 2**32 - 1, 1.5, 2**32 - 1, 0.5, 0.5, 2**64 - 1),
        *(listed, listed, full(min(limits.vocab_size, 65_536)), listed, listed.astype(np.float32)),
        *(1.5, 1.5, 1.5, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        grammar="é" * (MAX_GRAMMAR_BYTES // 2),
    )
    admission = Admission(2**32 - 1, full(limits.max_model_len), 2**32 - 1, full(num_blocks), params)
    largest = StepPlan(
        epoch=2**64 - 1,
        step_id=2**64 - 1,
        retired_slots=full(num_slots),
        admissions=(admission,) * min(num_slots, 3),
        table_updates=full(3 * num_slots * num_blocks).reshape(-1, 3),
        block_copies=full(2 * limits.num_blocks).reshape(-1, 2),
        row_counts=full(2 * num_slots).reshape(-1, 2),
        forks=(Fork(2**32 - 1, 2**32 - 1, 2**64 - 1),) * num_slots,
        branches=full(3 * num_slots).reshape(-1, 3),
        published=Publication(full(limits.num_blocks), bytes(limits.num_blocks * DIGEST_BYTES)),
        withdrawn_blocks=full(limits.num_blocks),
    )
    message = plan_message(largest)
    check_size(message, limits)
    num_admitted = len(message.admissions)
    num_bytes = pb.RunRequest(plan=message).ByteSize()
    num_bytes += (num_slots - num_admitted) * (message.admissions[0].ByteSize() + 10)
    assert num_bytes <= max_message_bytes(limits) < 1.2 * num_bytes + 1024 * (num_slots + 1)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.StepPlan(admissions=[pb.Admission()] * 5), "admissions: 5 entries, where at most 4 make sense"),
        (pb.StepPlan(forks=[pb.Fork()] * 5), "forks: 5 entries"),
        (pb.StepPlan(table_updates=bytes(12 * 4 * 16 + 1)), "table_updates: 193 entries"),
        (pb.StepPlan(block_copies=bytes(8 * 33 + 1)), "block_copies: 67 entries"),
        (pb.StepPlan(row_counts=bytes(8 * 4 + 1)), "row_counts: 9 entries"),
        (pb.StepPlan(branches=bytes(12 * 4 + 1)), "branches: 13 entries"),
        (pb.StepPlan(published_blocks=bytes(4 * 33 + 1)), "published_blocks: 34 entries"),
        (pb.StepPlan(published_digests=bytes(32 * 33 + 1)), "published_digests: 265 entries"),
        (pb.StepPlan(withdrawn_blocks=bytes(4 * 33 + 1)), "withdrawn_blocks: 34 entries"),
        (pb.StepPlan(admissions=[pb.Admission(token_ids=bytes(4 * 64 + 1))]), "token_ids: 65 entries"),
        (pb.StepPlan(admissions=[pb.Admission(block_table=bytes(4 * 16 + 1))]), "block_table: 17 entries"),
        (
            pb.StepPlan(admissions=[pb.Admission(params=pb.SequenceParams(allowed_token_ids=bytes(401)))]),
            "allowed_token_ids: 101 entries",
        ),
        (
            pb.StepPlan(admissions=[pb.Admission(params=pb.SequenceParams(stop_token_ids=bytes(4097)))]),
            "stop_token_ids: 1025 entries",
        ),
        (
            pb.StepPlan(admissions=[pb.Admission(params=pb.SequenceParams(grammar="é" * (128 << 10) + "a"))]),
            "params.grammar: more than 262144 bytes",
        ),
    ],
)
def test_parts_that_are_too_long_are_refused(message: pb.StepPlan, complaint: str) -> None:
    with pytest.raises(PlanRejected, match=complaint):
        check_size(message, LIMITS)


def test_every_list_that_a_request_may_have_fits() -> None:
    limits = RequestLimits()
    assert limits.max_num_allowed_token_ids <= 65_536
    assert limits.max_num_logit_bias <= MAX_LISTED_TOKENS


async def test_a_message_larger_than_any_plan_is_refused_unread(stub, fake_runner) -> None:
    call, epoch = await open_stream(stub)
    await call.write(plan(epoch, 1, retired_slots=bytes(max_message_bytes(LIMITS))))
    code, details = await status(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, details
    assert not fake_runner.executed
    call, _ = await open_stream(stub)
    call.cancel()
