"""Checks every rule that a plan must keep, before anything changes.

`project` computes the counters as they are right before the step's tokens are computed (effects 0 to 6 at the top of
protos/quire/executor/v1/executor.proto). If the plan breaks a rule, it raises PlanRejected with a message that names
the rule. It mutates nothing: the slots adopt the projected counters afterwards.
"""

from dataclasses import fields

import numpy as np

from executor.errors import PlanRejected
from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, Fork, Interval, Ints, SequenceParams, StepPlan
from executor.plans.slot_counters import SlotCounters
from quire.plan_stream import DIGEST_BYTES

_INTERVALS: tuple[tuple[str, Interval], ...] = tuple(
    (each.name, each.metadata["interval"]) for each in fields(SequenceParams) if "interval" in each.metadata
)
_TOKEN_IDS = tuple(each.name for each in fields(SequenceParams) if "are_token_ids" in each.metadata)
_SEEDS = dict(_INTERVALS)["seed"]


def project(plan: StepPlan, now: SlotCounters, limits: PlanLimits) -> SlotCounters:
    """Returns the counters after retiring, admitting, branching, table updates and row counts. Raises PlanRejected."""
    after = now.copy()
    _check_publications(plan, limits)
    _retire(plan.retired_slots, after, limits)
    for admission in plan.admissions:
        _admit(admission, after, limits)
    _branch(plan.branches, after, limits)
    _extend_tables(plan.table_updates, after, limits)
    _check_copies(plan.block_copies, limits)
    _set_row_counts(plan.row_counts, after, limits)
    _check_rows(after, limits)
    _check_forks(plan.forks, after, limits)
    return after


def _check_publications(plan: StepPlan, limits: PlanLimits) -> None:
    blocks, digests = plan.published.blocks, plan.published.digests
    if len(digests) != len(blocks) * DIGEST_BYTES:
        raise PlanRejected(f"published_digests: {len(digests)} bytes for {len(blocks)} digests of {DIGEST_BYTES}")
    if blocks.size:
        _check_blocks("published_blocks", blocks, limits)
        _check_distinct("published_blocks: block", blocks)
    if plan.withdrawn_blocks.size:
        _check_blocks("withdrawn_blocks", plan.withdrawn_blocks, limits)
        _check_distinct("withdrawn_blocks: block", plan.withdrawn_blocks)


def _retire(slots: Ints, after: SlotCounters, limits: PlanLimits) -> None:
    if not slots.size:
        return
    _check_slots("retired_slots", slots, after, limits)
    _check_distinct("retired_slots: slot", slots)
    after.clear(slots)


def _admit(admission: Admission, after: SlotCounters, limits: PlanLimits) -> None:
    slot, where = admission.slot, f"admission to slot {admission.slot}"
    if not 0 <= slot < limits.max_num_seqs:
        raise PlanRejected(f"{where}: there are {limits.max_num_seqs} slots")
    if after.is_admitted[slot]:
        raise PlanRejected(f"{where}: the slot is taken")
    num_tokens, num_blocks = len(admission.token_ids), len(admission.block_table)
    if not num_tokens:
        raise PlanRejected(f"{where}: no tokens")
    _check_token_ids(f"{where}: token_ids", admission.token_ids, limits)
    if not 0 <= admission.num_computed_tokens < num_tokens:
        raise PlanRejected(
            f"{where}: {admission.num_computed_tokens} of {num_tokens} tokens computed, but one must be left"
        )
    if num_blocks > limits.max_blocks_per_seq:
        raise PlanRejected(f"{where}: {num_blocks} blocks, more than {limits.max_blocks_per_seq} for a sequence")
    _check_blocks(f"{where}: block_table", admission.block_table, limits)
    _check_params(where, admission.params, num_tokens, limits)
    after.is_admitted[slot] = True
    after.is_beam[slot] = admission.params.num_candidates > 0
    after.num_tokens[slot] = num_tokens
    after.num_computed_tokens[slot] = admission.num_computed_tokens
    after.num_blocks[slot] = num_blocks


def _check_params(where: str, params: SequenceParams, num_tokens: int, limits: PlanLimits) -> None:
    if not num_tokens < params.max_total_tokens <= limits.max_model_len:
        raise PlanRejected(
            f"{where}: max_total_tokens {params.max_total_tokens} is not above its {num_tokens} tokens"
            f" and within max_model_len {limits.max_model_len}"
        )
    for name, interval in _INTERVALS:
        if (value := getattr(params, name)) not in interval:
            raise PlanRejected(f"{where}: {name} {value} is not in {interval}")
    for name in _TOKEN_IDS:
        _check_token_ids(f"{where}: {name}", getattr(params, name), limits)
    _check_bias(where, params)
    if not 0 <= params.num_prompt_tokens <= num_tokens:
        raise PlanRejected(f"{where}: num_prompt_tokens {params.num_prompt_tokens} of {num_tokens} tokens")
    _check_reports(where, params, limits)


def _check_bias(where: str, params: SequenceParams) -> None:
    _check_distinct(f"{where}: bias_token_ids: token id", params.bias_token_ids)
    if len(params.bias_values) != len(params.bias_token_ids):
        raise PlanRejected(f"{where}: {len(params.bias_values)} bias_values for {len(params.bias_token_ids)} tokens")
    if not np.isfinite(params.bias_values).all():
        raise PlanRejected(f"{where}: bias_values: not all are finite")


def _check_reports(where: str, params: SequenceParams, limits: PlanLimits) -> None:
    for name, num_reported, most in (
        ("num_logprobs", params.num_logprobs, limits.vocab_size + 1),
        ("num_prompt_logprobs", params.num_prompt_logprobs, limits.vocab_size + 1),
        ("num_candidates", params.num_candidates, limits.vocab_size),
    ):
        if not 0 <= num_reported <= most:
            raise PlanRejected(f"{where}: {name} {num_reported} is not in [0, {most}]")


def _branch(branches: Ints, after: SlotCounters, limits: PlanLimits) -> None:
    """Checks branches: parents are beams that have reported, and so are overwritten slots unless they are empty."""
    if not branches.size:
        return
    slots, parents, token_ids = branches.T
    _check_in_range("branches", slots, limits)
    _check_slots("branches: parent", parents, after, limits)
    _check_distinct("branches: slot", slots)
    _check_token_ids("branches", token_ids, limits)
    has_reported = after.has_reported
    if others := parents[~has_reported[parents]].tolist():
        raise PlanRejected(f"branches: parent slot {others[0]} is not a beam that has reported")
    if others := slots[after.is_admitted[slots] & ~has_reported[slots]].tolist():
        raise PlanRejected(f"branches: slot {others[0]} is taken")
    if full := parents[after.num_tokens[parents] >= limits.max_model_len].tolist():
        raise PlanRejected(f"branches: parent slot {full[0]} has max_model_len {limits.max_model_len} tokens already")
    after.copy_slots(parents, slots)
    after.num_tokens[slots] += 1
    after.row_count[slots] = 1


def _extend_tables(updates: Ints, after: SlotCounters, limits: PlanLimits) -> None:
    """Checks table updates: entries may replace others or extend a table, but a table never has holes."""
    if not updates.size:
        return
    slots, logical, physical = updates.T
    _check_slots("table_updates", slots, after, limits)
    _check_blocks("table_updates", physical, limits)
    if ((logical < 0) | (logical >= limits.max_blocks_per_seq)).any():
        raise PlanRejected(f"table_updates: logical block outside [0, {limits.max_blocks_per_seq})")
    _check_distinct("table_updates: entry", slots.astype(np.int64) * limits.max_blocks_per_seq + logical)
    is_new = logical >= after.num_blocks[slots]
    after.num_blocks += np.bincount(slots[is_new], minlength=limits.max_num_seqs).astype(np.int32)
    # The new entries of a slot are distinct, so they fill the table exactly unless one lies beyond its new length.
    if (logical >= after.num_blocks[slots]).any():
        slot = slots[np.argmax(logical >= after.num_blocks[slots])]
        raise PlanRejected(f"table_updates: slot {slot}: the table would have a hole")


def _check_copies(copies: Ints, limits: PlanLimits) -> None:
    if not copies.size:
        return
    _check_blocks("block_copies", copies.ravel(), limits)
    sources, destinations = copies.T
    _check_distinct("block_copies: destination", destinations)
    if both := np.intersect1d(sources, destinations).tolist():
        raise PlanRejected(f"block_copies: block {both[0]} is both a source and a destination")


def _set_row_counts(row_counts: Ints, after: SlotCounters, limits: PlanLimits) -> None:
    if not row_counts.size:
        return
    slots, counts = row_counts.T
    _check_slots("row_counts", slots, after, limits)
    _check_distinct("row_counts: slot", slots)
    if (counts < 0).any():
        raise PlanRejected(f"row_counts: slot {slots[np.argmax(counts < 0)]}: {counts.min()} tokens per step")
    after.row_count[slots] = counts


def _check_rows(after: SlotCounters, limits: PlanLimits) -> None:
    """Checks that each row has a token to compute and a block to write to, and that all rows fit into one step.

    The table of a slot without rows has to cover its computed tokens, too: entries beyond it are those of an older
    sequence, perhaps of another lease.
    """
    if (num_batched := int(after.row_count.sum(dtype=np.int64))) > limits.max_num_batched_tokens:
        raise PlanRejected(f"{num_batched} tokens in one step, more than {limits.max_num_batched_tokens}")
    planned = after.num_planned_tokens
    if (beyond := after.has_ended & (after.row_count > 1)).any():
        raise PlanRejected(f"slot {np.argmax(beyond)}: has ended, but computes more than one token per step")
    is_computing = (after.row_count > 0) & ~after.has_ended
    if (beyond := is_computing & (planned > after.num_tokens)).any():
        slot = np.argmax(beyond)
        raise PlanRejected(
            f"slot {slot}: {after.row_count[slot]} tokens to compute after {after.num_computed_tokens[slot]},"
            f" but only {after.num_tokens[slot]} are known"
        )
    is_live = after.is_admitted & ~after.has_ended
    if (short := is_live & (planned > after.num_blocks * limits.block_size)).any():
        slot = np.argmax(short)
        raise PlanRejected(
            f"slot {slot}: a block table of {after.num_blocks[slot]} is too short for {planned[slot]} tokens"
        )


def _check_forks(forks: tuple[Fork, ...], after: SlotCounters, limits: PlanLimits) -> None:
    """Checks that parents sample in this step (or are overrun) and that children take empty slots."""
    children: set[int] = set()
    for fork in forks:
        parent, child, where = fork.parent_slot, fork.child_slot, f"fork of slot {fork.parent_slot}"
        if not (0 <= parent < limits.max_num_seqs and 0 <= child < limits.max_num_seqs):
            raise PlanRejected(f"{where} to slot {child}: there are {limits.max_num_seqs} slots")
        if after.is_admitted[child] or child in children:
            raise PlanRejected(f"{where}: slot {child} is taken")
        if not after.is_admitted[parent]:
            raise PlanRejected(f"{where}: the slot is empty")
        samples = after.num_planned_tokens[parent] == after.num_tokens[parent] or after.has_ended[parent]
        if not (after.row_count[parent] and samples) or after.is_beam[parent]:
            raise PlanRejected(f"{where}: it does not sample in this step")
        if fork.seed not in _SEEDS:
            raise PlanRejected(f"{where}: seed {fork.seed} is not in {_SEEDS}")
        children.add(child)


def _check_slots(where: str, slots: Ints, after: SlotCounters, limits: PlanLimits) -> None:
    _check_in_range(where, slots, limits)
    if empty := slots[~after.is_admitted[slots]].tolist():
        raise PlanRejected(f"{where}: slot {empty[0]} is empty")


def _check_in_range(where: str, slots: Ints, limits: PlanLimits) -> None:
    if outside := slots[(slots < 0) | (slots >= limits.max_num_seqs)].tolist():
        raise PlanRejected(f"{where}: slot {outside[0]}: there are {limits.max_num_seqs} slots")


def _check_blocks(where: str, blocks: Ints, limits: PlanLimits) -> None:
    if outside := blocks[(blocks < 1) | (blocks >= limits.num_blocks)].tolist():
        raise PlanRejected(f"{where}: block {outside[0]} is not in [1, {limits.num_blocks})")


def _check_token_ids(where: str, token_ids: Ints, limits: PlanLimits) -> None:
    if outside := token_ids[(token_ids < 0) | (token_ids >= limits.vocab_size)].tolist():
        raise PlanRejected(f"{where}: token id {outside[0]} is not in [0, {limits.vocab_size})")


def _check_distinct(where: str, values: np.ndarray) -> None:
    if len(np.unique(values)) != len(values):
        raise PlanRejected(f"{where} named twice")
