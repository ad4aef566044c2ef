"""Encodes plans as protobuf messages and decodes results. No other module knows the plan stream's message types.

Integers travel as packed little-endian int32, so that no message holds a Python object for each token.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from sys import byteorder
from typing import Any

from quire.executor.v1 import executor_pb2 as pb
from quire.plan_stream import DIGEST_BYTES, FEATURES, PROTOCOL_VERSION
from scheduler.core import (
    Admission,
    FinishReason,
    Fork,
    Logprobs,
    ResultMismatch,
    SequenceParams,
    StepPlan,
    StepResult,
)
from scheduler.engine.step_trace import ExecutorTimings

_END_REASONS: dict[int, FinishReason | None] = {
    pb.END_REASON_UNSPECIFIED: None,
    pb.END_REASON_EOS: FinishReason.EOS,
    pb.END_REASON_LENGTH: FinishReason.LENGTH,
    pb.END_REASON_STOP: FinishReason.STOP,
    pb.END_REASON_NOT_FINITE: FinishReason.NOT_FINITE,
    pb.END_REASON_GRAMMAR: FinishReason.GRAMMAR,
    pb.END_REASON_DEFERRED: None,
}


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """The executor's description of itself, from which the scheduler configures itself. `num_blocks` counts the null
    block."""

    model_name: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_digest: str = ""
    incarnation: str = ""
    protocol_version: int = PROTOCOL_VERSION
    least_protocol_version: int = 0
    features: tuple[str, ...] = FEATURES


def decode_description(message: pb.DescribeResponse) -> ExecutorDescription:
    values = {field.name: getattr(message, field.name) for field in fields(ExecutorDescription)}
    return ExecutorDescription(**values | {"features": tuple(message.features)})


def encode_plan(plan: StepPlan, lease: int) -> pb.StepPlan:
    """Returns the message of a plan. Its `epoch` is the number of the lease; the core counts epochs by itself."""
    return pb.StepPlan(
        epoch=lease,
        step_id=plan.step_id,
        retired_slots=pack(plan.retired_slots),
        admissions=[_encode_admission(admission) for admission in plan.admissions],
        table_updates=pack(plan.table_updates),
        block_copies=pack(plan.block_copies),
        row_counts=pack(plan.row_counts),
        forks=[_encode_fork(fork) for fork in plan.forks],
        branches=pack(plan.branches),
        published_blocks=pack(list(plan.published)),
        published_digests=b"".join(plan.published.values()),
        withdrawn_blocks=pack(plan.withdrawn_blocks),
    )


def decode_retained(lease: pb.Lease, num_blocks: int) -> list[tuple[int, bytes]]:
    """Returns the (block, digest) that a lease names.

    Raises ResultMismatch unless they are distinct blocks of the pool with a digest each.
    """
    packed, digests = lease.retained_blocks, lease.retained_digests
    blocks = unpack(packed) if len(packed) % 4 == 0 else []
    is_right = len(digests) == len(packed) // 4 * DIGEST_BYTES and len(packed) % 4 == 0
    if not is_right or len(set(blocks)) != len(blocks) or not all(0 < block < num_blocks for block in blocks):
        raise ResultMismatch(
            f"a lease with {len(packed)} bytes of retained blocks and {len(digests)} bytes of digests, "
            f"which are not distinct blocks of a pool of {num_blocks}"
        )
    return [(block, digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]) for i, block in enumerate(blocks)]


def decode_result(message: pb.StepResult, epoch: int) -> StepResult:
    """Returns the result in a message, in the core's epoch. Raises ResultMismatch for a malformed message."""
    end_reasons: list[FinishReason | None] | None = None
    if message.end_reasons:
        try:
            end_reasons = [_END_REASONS[reason] for reason in message.end_reasons]
        except KeyError as error:
            raise ResultMismatch(f"step {message.step_id} ended a sequence for unknown reason {error}") from error
    if len(message.token_ids) % 4:
        raise ResultMismatch(f"{len(message.token_ids)} bytes of token ids in the result of step {message.step_id}")
    return StepResult(
        epoch=epoch,
        step_id=message.step_id,
        token_ids=unpack(message.token_ids),
        end_reasons=end_reasons,
        deferred=[place for place, reason in enumerate(message.end_reasons) if reason == pb.END_REASON_DEFERRED],
        logprobs=_decode_logprobs(message, "logprobs"),
        prompt_logprobs=_decode_logprobs(message, "prompt_logprobs"),
        candidates=_decode_logprobs(message, "candidates"),
    )


def _decode_logprobs(message: pb.StepResult, name: str) -> Logprobs | None:
    """Returns flat arrays, which the core splits by sequence, or None if no request asked for them."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    logprobs: pb.Logprobs = getattr(message, name)
    for part in ("token_ids", "values", "ranks"):
        if len(getattr(logprobs, part)) % 4:
            raise ResultMismatch(f"{len(getattr(logprobs, part))} bytes of {name}.{part} in step {message.step_id}")
    return Logprobs(_to_array("i", logprobs.token_ids), _to_array("f", logprobs.values), _to_array("i", logprobs.ranks))


def decode_timings(message: pb.StepResult) -> ExecutorTimings:
    timings = message.timings
    return ExecutorTimings(
        queue_ns=timings.queue_ns,
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
        idle_ns=timings.idle_ns,
        prepare_overlaps=timings.prepare_overlaps,
    )


def pack(values: SequenceOf[int]) -> bytes:
    """Packs integers as little-endian int32, without padding."""
    return _to_bytes("i", values)


def pack_floats(values: SequenceOf[float]) -> bytes:
    """Packs numbers as little-endian float32, without padding."""
    return _to_bytes("f", values)


def unpack(data: bytes) -> list[int]:
    return _to_array("i", data).tolist()


def _to_bytes(typecode: str, values: SequenceOf[float]) -> bytes:
    packed = array(typecode, values)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _to_array(typecode: str, data: bytes) -> "array[Any]":
    unpacked = array(typecode, data)
    if byteorder == "big":
        unpacked.byteswap()
    return unpacked


def _encode_admission(admission: Admission) -> pb.Admission:
    return pb.Admission(
        slot=admission.slot,
        token_ids=pack(admission.token_ids),
        num_computed_tokens=admission.num_computed_tokens,
        block_table=pack(admission.block_table),
        params=_encode_params(admission.params, admission.num_prompt_tokens),
    )


def _encode_params(params: SequenceParams, num_prompt_tokens: int) -> pb.SequenceParams:
    return pb.SequenceParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        eos_token_ids=pack(params.eos_token_ids),
        stop_token_ids=pack(params.stop_token_ids),
        max_total_tokens=params.max_total_tokens,
        min_total_tokens=params.min_total_tokens,
        allowed_token_ids=pack(params.allowed_token_ids),
        bias_token_ids=pack(params.bias_token_ids),
        bias_values=pack_floats(params.bias_values),
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        num_prompt_tokens=num_prompt_tokens,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
        num_candidates=params.num_candidates,
        grammar=params.grammar,
    )


def _encode_fork(fork: Fork) -> pb.Fork:
    return pb.Fork(parent_slot=fork.parent_slot, child_slot=fork.child_slot, seed=fork.seed)
