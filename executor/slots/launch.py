"""The record of everything that a model reads in one step: what a plan comes to once the slots have applied it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Ints
from executor.slots.slots import Slots
from executor.slots.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Launch:
    """A step of T rows of S sequences as a model computes it, with L rows of logits; see `StepInputs`.

    token_ids[T], positions[T] int32; slot_mapping[T] int64, where the row's KV goes: block * block_size + offset
    slots[S]            rows of block_tables, those of the num_decodes that have one row first
    query_starts[S + 1], context_lens[S], logit_rows[L]: as in `StepInputs`
    block_tables        int32: all slots' on the rank that has slots, the S of this step on the others
    """

    num_decodes: int
    token_ids: Ints
    positions: Ints
    slot_mapping: NDArray[np.int64]
    slots: Ints
    query_starts: Ints
    context_lens: Ints
    logit_rows: NDArray[np.int64]
    block_tables: Ints

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def num_table_columns(self, block_size: int) -> int:
        """Returns how many columns of the block tables the longest context needs."""
        return -(-int(self.context_lens.max()) // block_size)


def launch_of(step: StepInputs, slots: Slots) -> Launch:
    """Returns what the model reads in a step. Call it before the sampled tokens are appended."""
    row_slots, positions, block_size = step.row_slots, step.positions, slots.limits.block_size
    blocks = slots.block_tables[row_slots, positions // block_size].astype(np.int64)
    return Launch(
        num_decodes=step.num_decodes,
        token_ids=slots.token_ids[row_slots, positions],
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        slots=step.slots,
        query_starts=step.query_starts,
        context_lens=step.context_lens,
        logit_rows=step.logit_rows,
        block_tables=slots.block_tables,
    )
