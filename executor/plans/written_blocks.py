"""Which parts of the KV pool the current lease has written: a sequence may attend only to those.

The pool keeps its contents when a lease ends. So the scheduler that gets the next lease could admit a sequence over a
block of another client's request, declare its tokens as computed, and read what it holds. The check below refuses
such a plan. It rests on one fact about each slot, which every plan keeps true:

    the first num_computed_tokens tokens of its table were written, or copied from what was written, under this lease

A step writes the tokens after num_computed_tokens, so decodes and prefills need no check. Two things need one: an entry
of a block table that covers computed tokens (of an admission with a cached prefix, or of a table update), and a copy
over a block that a sequence uses.

What running sequences have written is recorded late, when a plan needs it or is about to forget it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.errors import PlanRejected
from executor.plans.limits import PlanLimits
from executor.plans.plan import Ints, StepPlan
from executor.plans.slot_counters import SlotCounters


class WrittenBlocks:
    """Counts the leading tokens of each physical block that the current lease has written.

    num_tokens[num_blocks]         0 for a block that the lease has not written; a retained block counts as written
    _num_recorded[max_num_seqs]    tokens of each slot whose blocks have been counted
    """

    def __init__(self, limits: PlanLimits) -> None:
        self._block_size = limits.block_size
        self.num_tokens: Ints = np.zeros(limits.num_blocks, dtype=np.int32)
        self._num_recorded: Ints = np.zeros(limits.max_num_seqs, dtype=np.int32)

    def clear(self, retained: Ints) -> None:
        """Forgets everything for a new lease, except that it knows the contents of the retained blocks."""
        self.num_tokens.fill(0)
        self.num_tokens[retained] = self._block_size
        self._num_recorded.fill(0)

    def check(self, plan: StepPlan, now: SlotCounters, after: SlotCounters, tables: Ints) -> None:
        """Raises PlanRejected if a sequence would attend to tokens that this lease has not written, or if the plan
        publishes a block that is not full of them.

        now, after  counters before the plan, and as `plan_check.project` returns them
        tables      block tables [max_num_seqs, max_blocks_per_seq] before the plan
        """
        slots, logical, blocks = _covering(plan, after, self._block_size)
        published = plan.published.blocks
        changes = (slots, plan.retired_slots, plan.branches, plan.block_copies, published)
        if not any(array.size for array in changes):
            return
        self._record(now, tables)
        if (unwritten := self.num_tokens[published] < self._block_size).any():
            raise PlanRejected(
                f"published_blocks: this lease has not written all of block {published[np.argmax(unwritten)]}"
            )
        self._check_entries(slots, logical, blocks, plan, after)
        if plan.block_copies.size:
            destinations = plan.block_copies[:, 1]
            loses = self._with_copies(destinations, plan.block_copies) < self.num_tokens[destinations]
            if loses.any():
                lost = destinations[loses]
                self._check_entries(*_used(lost, plan, after, tables, self._block_size), plan, after)

    def apply(self, plan: StepPlan, after: SlotCounters) -> None:
        """Follows a plan that `check` has accepted: copies the counts of copied blocks, and restarts those of slots.

        A child counts only what it computes itself. What its parent has computed is counted for the parent: if that has
        ended, a copy may have replaced its blocks, and on a GPU its last rows went to the null block.
        """
        if plan.block_copies.size:
            sources, destinations = plan.block_copies.T
            self.num_tokens[destinations] = self.num_tokens[sources]
        for begun in (*plan.admissions, *plan.branches[:, 0].tolist()):
            self._num_recorded[begun if isinstance(begun, int) else begun.slot] = 0
        for fork in plan.forks:
            self._num_recorded[fork.child_slot] = after.num_planned_tokens[fork.parent_slot]

    def _check_entries(
        self, slots: Ints, logical: NDArray[Any], blocks: Ints, plan: StepPlan, after: SlotCounters
    ) -> None:
        """Raises PlanRejected unless the computed tokens of these table entries are written after the plan's copies."""
        if not slots.size:
            return
        needed = np.minimum(after.num_computed_tokens[slots] - logical * self._block_size, self._block_size)
        if (unwritten := self._with_copies(blocks, plan.block_copies) < needed).any():
            index = int(np.argmax(unwritten))
            raise PlanRejected(
                f"slot {slots[index]}: block {blocks[index]} counts as computed, but this lease has not written its "
                f"first {needed[index]} tokens"
            )

    def _with_copies(self, blocks: Ints, copies: Ints) -> Ints:
        """Returns the counts of blocks as they are after the plan's copies."""
        if copies.size:
            sources, destinations = copies[np.argsort(copies[:, 1])].T
            places = np.minimum(np.searchsorted(destinations, blocks), len(destinations) - 1)
            blocks = np.where(destinations[places] == blocks, sources[places], blocks)
        counts: Ints = self.num_tokens[blocks]
        return counts

    def _record(self, counters: SlotCounters, tables: Ints) -> None:
        """Counts what each slot has written since it was recorded last."""
        computed, size = counters.num_computed_tokens, self._block_size
        slots = np.flatnonzero(counters.is_admitted & (computed > self._num_recorded))
        first, end = self._num_recorded[slots] // size, -(-computed[slots] // size)
        rows, logical = _entries(slots, first, end)
        # Slots that share a block have written the same number of its tokens, or the larger one counts.
        np.maximum.at(self.num_tokens, tables[rows, logical], np.minimum(computed[rows] - logical * size, size))
        self._num_recorded[slots] = computed[slots]


def blocks_to_write(counters: SlotCounters, computing: Ints, tables: Ints, block_size: int) -> Ints:
    """Returns the physical blocks to which these slots write in a step. A block can be in the result twice."""
    computed = counters.num_computed_tokens[computing]
    end = -(-(computed + counters.row_count[computing]) // block_size)
    blocks: Ints = tables[_entries(computing, computed // block_size, end)]
    return blocks


def _covering(plan: StepPlan, after: SlotCounters, block_size: int) -> tuple[Ints, Ints, Ints]:
    """Returns the entries (slot, logical block, physical block) of the plan that cover computed tokens."""
    entries = [plan.table_updates]
    for admission in plan.admissions:
        num_blocks = min(-(-admission.num_computed_tokens // block_size), len(admission.block_table))
        if num_blocks:
            entry = np.empty((num_blocks, 3), dtype=np.int32)
            entry[:, 0] = admission.slot
            entry[:, 1] = np.arange(num_blocks)
            entry[:, 2] = admission.block_table[:num_blocks]
            entries.append(entry)
    slots, logical, blocks = (entries[0] if len(entries) == 1 else np.concatenate(entries)).T
    covers = logical * block_size < after.num_computed_tokens[slots]
    return slots[covers], logical[covers], blocks[covers]


def _used(
    blocks: Ints, plan: StepPlan, after: SlotCounters, tables: Ints, block_size: int
) -> tuple[Ints, NDArray[np.int64], Ints]:
    """Returns the entries (slot, logical block, physical block) with these blocks that sequences keep under the plan.

    Entries that the plan sets are not among them: `_covering` returns those.
    """
    parents = np.arange(len(tables))
    parents[plan.branches[:, 0]] = plan.branches[:, 1]
    goes_on = after.is_admitted & ~after.has_ended
    goes_on[[admission.slot for admission in plan.admissions]] = False
    slots = np.flatnonzero(goes_on).astype(np.int32)
    width = int(after.num_blocks[slots].max(initial=0))
    kept = tables[parents[slots], :width]
    updates = plan.table_updates[goes_on[plan.table_updates[:, 0]] & (plan.table_updates[:, 1] < width)]
    kept[np.searchsorted(slots, updates[:, 0]), updates[:, 1]] = 0  # the null block, which is no destination
    covers = np.arange(width) * block_size < after.num_computed_tokens[slots, np.newaxis]
    rows, logical = np.nonzero(np.isin(kept, blocks) & covers)
    return slots[rows], logical, kept[rows, logical]


def _entries(slots: NDArray[Any], first: Ints, end: Ints) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the entries (slot, logical block) from first[i] to before end[i] of each slots[i]."""
    num_blocks = end - first
    if (num_blocks == 1).all():  # nearly always, while sequences decode
        return slots, first
    starts = np.cumsum(num_blocks) - num_blocks
    return np.repeat(slots, num_blocks), np.arange(int(num_blocks.sum())) + np.repeat(first - starts, num_blocks)
