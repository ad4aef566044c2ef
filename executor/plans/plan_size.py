"""Bounds the size of plans by what the executor described, before anything is decoded."""

from executor.errors import PlanRejected
from executor.plans.limits import PlanLimits
from quire.executor.v1 import executor_pb2 as pb
from quire.grammars import MAX_GRAMMAR_BYTES
from quire.plan_stream import DIGEST_BYTES

_INT = 4
"""Bytes of an int32 and of a float32."""

MAX_ALLOWED_TOKENS = 65_536
"""Longest list of allowed tokens; shorter if the vocabulary is smaller, because an id needs no second entry."""

MAX_LISTED_TOKENS = 1_024
"""Longest of the other lists in the parameters of a sequence: EOS ids, stop ids, biases."""

_NUM_LISTS = 4
_FIXED_BYTES = 512
"""More than all numbers of an admission or of a fork take, with the framing of their fields."""


def max_message_bytes(limits: PlanLimits) -> int:
    """Returns the size that no valid plan exceeds: every slot is admitted with all that a sequence may have."""
    num_table_bytes = _INT * limits.max_blocks_per_seq
    num_admission_bytes = (
        _FIXED_BYTES
        + _INT * limits.max_model_len
        + num_table_bytes
        + _INT * (_max_allowed(limits) + _NUM_LISTS * MAX_LISTED_TOKENS)
        + MAX_GRAMMAR_BYTES
    )
    num_slot_bytes = num_admission_bytes + _FIXED_BYTES + 3 * num_table_bytes + 6 * _INT
    num_block_bytes = 4 * _INT + DIGEST_BYTES  # it may be copied from, copied over, published and withdrawn
    return limits.max_num_seqs * num_slot_bytes + num_block_bytes * limits.num_blocks + _FIXED_BYTES


def check_size(plan: pb.StepPlan, limits: PlanLimits) -> None:
    """Raises PlanRejected if a part of the plan is longer than any valid one. Reads only lengths."""
    num_slots = limits.max_num_seqs
    _check("admissions", len(plan.admissions), num_slots)
    _check("forks", len(plan.forks), num_slots)
    _check_ints("retired_slots", plan.retired_slots, num_slots)
    _check_ints("table_updates", plan.table_updates, 3 * num_slots * limits.max_blocks_per_seq)
    _check_ints("block_copies", plan.block_copies, 2 * limits.num_blocks)
    _check_ints("row_counts", plan.row_counts, 2 * num_slots)
    _check_ints("branches", plan.branches, 3 * num_slots)
    _check_ints("published_blocks", plan.published_blocks, limits.num_blocks)
    _check_ints("published_digests", plan.published_digests, limits.num_blocks * DIGEST_BYTES // _INT)
    _check_ints("withdrawn_blocks", plan.withdrawn_blocks, limits.num_blocks)
    for admission in plan.admissions:
        _check_ints("admissions.token_ids", admission.token_ids, limits.max_model_len)
        _check_ints("admissions.block_table", admission.block_table, limits.max_blocks_per_seq)
        params = admission.params
        _check_ints("params.allowed_token_ids", params.allowed_token_ids, _max_allowed(limits))
        for name in ("eos_token_ids", "stop_token_ids", "bias_token_ids", "bias_values"):
            _check_ints(f"params.{name}", getattr(params, name), MAX_LISTED_TOKENS)
        _check_text("params.grammar", params.grammar, MAX_GRAMMAR_BYTES)


def _max_allowed(limits: PlanLimits) -> int:
    return min(limits.vocab_size, MAX_ALLOWED_TOKENS)


def _check_ints(field: str, data: bytes, most: int) -> None:
    _check(field, -(-len(data) // _INT), most)


def _check_text(field: str, text: str, most: int) -> None:
    if len(text) > most or len(text.encode()) > most:
        raise PlanRejected(f"{field}: more than {most} bytes")


def _check(field: str, number: int, most: int) -> None:
    if number > most:
        raise PlanRejected(f"{field}: {number} entries, where at most {most} make sense")
