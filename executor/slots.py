"""The persistent batch: what the executor knows of every sequence that has a slot.

It is a cache of the plan stream and decides nothing. `apply` takes effects 1 to 3 and 5 of a plan, `advance`, `fork`
and `append` what happens during the step. Counters say which part of the arrays means anything.
"""

import numpy as np
from numpy.typing import NDArray

from executor.limits import Limits
from executor.plan import Fork, Ints, StepPlan
from executor.plan_check import project
from executor.sampling_table import Draw, SamplingTable
from executor.slot_counters import SlotCounters


class Slots:
    """token_ids[max_num_seqs, max_model_len], block_tables[max_num_seqs, max_blocks_per_seq], and the counters.

    Both matrices are taken from the system page by page as they are written. Of the step that was applied last, by
    ascending slot:

    computing  slots that compute tokens
    overrun    slots that have ended but still have rows: nothing is written for them, their result means nothing
    sampling   slots that reach their last known token
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = SlotCounters.empty(limits.max_num_seqs)
        self.token_ids = np.zeros((limits.max_num_seqs, limits.max_model_len), dtype=np.int32)
        self.block_tables = np.zeros((limits.max_num_seqs, limits.max_blocks_per_seq), dtype=np.int32)
        self._sampling = SamplingTable(limits.max_num_seqs, limits.vocab_size)
        self._sort_out()

    def clear(self) -> None:
        """All slots are empty: a new epoch."""
        self.counters = SlotCounters.empty(self.limits.max_num_seqs)
        self._sampling.clear()
        self._sort_out()

    def apply(self, plan: StepPlan) -> None:
        """Retires, admits, sets table entries and row counts. Raises PlanRejected, and then nothing has changed."""
        self.counters = project(plan, self.counters, self.limits)
        for admission in plan.admissions:
            self.token_ids[admission.slot, : len(admission.token_ids)] = admission.token_ids
            self.block_tables[admission.slot, : len(admission.block_table)] = admission.block_table
            self._sampling.set(admission.slot, admission.params)
        if plan.table_updates.size:
            slots, logical, physical = plan.table_updates.T
            self.block_tables[slots, logical] = physical
        self._sort_out()

    def _sort_out(self) -> None:
        """Who computes, who is overrun, and who samples in this step."""
        counters = self.counters
        has_rows = counters.row_count > 0
        self.computing = _indices(has_rows & ~counters.has_ended)
        self.overrun = _indices(has_rows & counters.has_ended)
        num_planned = counters.num_computed_tokens[self.computing] + counters.row_count[self.computing]
        self.sampling = self.computing[num_planned == counters.num_tokens[self.computing]]

    def advance(self) -> None:
        """The KV of this step's rows is in the pool."""
        computing = self.computing
        self.counters.num_computed_tokens[computing] += self.counters.row_count[computing]

    def fork(self, forks: tuple[Fork, ...]) -> None:
        """Children become copies of their parents, which have advanced but not sampled yet; one row a step each."""
        counters = self.counters
        for fork in forks:
            parent, child = fork.parent_slot, fork.child_slot
            counters.copy_slot(parent, child)
            counters.row_count[child] = 1
            num_tokens, num_blocks = counters.num_tokens[parent], counters.num_blocks[parent]
            self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
            self.block_tables[child, :num_blocks] = self.block_tables[parent, :num_blocks]
            self._sampling.copy_slot(parent, child, fork.seed)

    def draw(self, slots: Ints) -> Draw:
        """How to sample the next token of each slot."""
        return self._sampling.draw(slots, self.counters.num_tokens[slots])

    def append(self, slots: Ints, token_ids: Ints) -> NDArray[np.uint8]:
        """Sampled tokens become the last known ones. Returns the end reason of each, EndReason.GOES_ON for most."""
        counters = self.counters
        self.token_ids[slots, counters.num_tokens[slots]] = token_ids
        counters.num_tokens[slots] += 1
        reasons = self._sampling.end_reasons(slots, token_ids, counters.num_tokens[slots])
        counters.has_ended[slots] = reasons != 0
        return reasons


def _indices(mask: NDArray[np.bool_]) -> Ints:
    return np.flatnonzero(mask).astype(np.int32)
