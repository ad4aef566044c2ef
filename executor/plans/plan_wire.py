"""The codec between plans and messages. Packed integers are read in place, without an object for each of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import numpy as np

from executor.errors import PlanRejected
from executor.plans.limits import PlanLimits
from executor.plans.plan import (
    Admission,
    Floats,
    Fork,
    Ints,
    Logprobs,
    Publication,
    SequenceParams,
    StepOutput,
    StepPlan,
)
from quire.executor.v1 import executor_pb2 as pb
from quire.grammars import FEATURE as GRAMMARS
from quire.plan_stream import FEATURES, LEAST_PROTOCOL_VERSION, OPTIONAL_FEATURES, PROTOCOL_VERSION

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


def plan_from_message(message: pb.StepPlan) -> StepPlan:
    """Decodes a plan. Raises PlanRejected if the length of a packed array is not a whole number of elements."""
    return StepPlan(
        epoch=message.epoch,
        step_id=message.step_id,
        retired_slots=_ints("retired_slots", message.retired_slots),
        admissions=tuple(_admission(admission) for admission in message.admissions),
        table_updates=_tuples("table_updates", message.table_updates, 3),
        block_copies=_tuples("block_copies", message.block_copies, 2),
        row_counts=_tuples("row_counts", message.row_counts, 2),
        forks=tuple(Fork(fork.parent_slot, fork.child_slot, fork.seed) for fork in message.forks),
        branches=_tuples("branches", message.branches, 3),
        published=Publication(_ints("published_blocks", message.published_blocks), message.published_digests),
        withdrawn_blocks=_ints("withdrawn_blocks", message.withdrawn_blocks),
    )


def output_to_message(output: StepOutput) -> pb.StepResult:
    timings, reports = output.timings, output.reports
    return pb.StepResult(
        epoch=output.epoch,
        step_id=output.step_id,
        token_ids=output.token_ids.astype(_INT32, copy=False).tobytes(),
        end_reasons=output.end_reasons.tobytes() if output.end_reasons.any() else b"",
        timings=pb.StepTimings(
            queue_ns=timings.queue_ns,
            prepare_ns=timings.prepare_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            idle_ns=timings.idle_ns,
            prepare_overlaps=timings.prepare_overlaps,
        ),
        logprobs=_logprobs(reports.logprobs),
        prompt_logprobs=_logprobs(reports.prompt_logprobs),
        candidates=_logprobs(reports.candidates),
    )


def lease_to_message(epoch: int, incarnation: str, retained: Publication) -> pb.Lease:
    return pb.Lease(
        epoch=epoch,
        incarnation=incarnation,
        retained_blocks=retained.blocks.astype(_INT32, copy=False).tobytes(),
        retained_digests=retained.digests,
    )


def description_to_message(
    limits: PlanLimits,
    *,
    incarnation: str,
    model_name: str,
    weights_digest: str,
    dtype: str,
    device: str,
    follows_grammars: bool = False,
) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        incarnation=incarnation,
        model_name=model_name,
        dtype=dtype,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=device,
        protocol_version=PROTOCOL_VERSION,
        least_protocol_version=LEAST_PROTOCOL_VERSION,
        features=FEATURES + OPTIONAL_FEATURES + ((GRAMMARS,) if follows_grammars else ()),
        weights_digest=weights_digest,
    )


def _admission(message: pb.Admission) -> Admission:
    return Admission(
        slot=message.slot,
        token_ids=_ints("admissions.token_ids", message.token_ids),
        num_computed_tokens=message.num_computed_tokens,
        block_table=_ints("admissions.block_table", message.block_table),
        params=_params(message.params),
    )


def _params(message: pb.SequenceParams) -> SequenceParams:
    """Decodes parameters: each field of the message has the name of the parameter."""
    values = {name: decode(getattr(message, name)) for name, decode in _DECODERS.items()}
    values["repetition_penalty"] = values["repetition_penalty"] or 1.0
    return SequenceParams(**values)


def _unchanged(value: Any) -> Any:
    return value


def _logprobs(logprobs: Logprobs | None) -> pb.Logprobs | None:
    if logprobs is None:
        return None
    return pb.Logprobs(
        token_ids=logprobs.token_ids.astype(_INT32, copy=False).tobytes(),
        values=logprobs.values.astype(_FLOAT32, copy=False).tobytes(),
        ranks=b"" if logprobs.ranks is None else logprobs.ranks.astype(_INT32, copy=False).tobytes(),
    )


def _floats(field: str, data: bytes) -> Floats:
    if len(data) % _FLOAT32.itemsize:
        raise PlanRejected(f"{field}: {len(data)} bytes are not a whole number of float32")
    return np.frombuffer(data, dtype=_FLOAT32)


def _ints(field: str, data: bytes) -> Ints:
    if len(data) % _INT32.itemsize:
        raise PlanRejected(f"{field}: {len(data)} bytes are not a whole number of int32")
    return np.frombuffer(data, dtype=_INT32)


def _tuples(field: str, data: bytes, width: int) -> Ints:
    values = _ints(field, data)
    if len(values) % width:
        raise PlanRejected(f"{field}: {len(values)} integers are not a whole number of {width}-tuples")
    return values.reshape(-1, width)


def _decoder(name: str, kind: object) -> Callable[[Any], Any]:
    packed: dict[object, Callable[[str, bytes], Any]] = {Ints: _ints, Floats: _floats}
    return partial(packed[kind], f"params.{name}") if kind in packed else _unchanged


_DECODERS = {name: _decoder(name, kind) for name, kind in get_type_hints(SequenceParams).items()}
"""Functions that turn the field of a message into a parameter, by name."""
