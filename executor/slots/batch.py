"""One step's rows as flat arrays: decodes first, then prefills.

    rows        │ d │ d │ d │ p  p  p  p │ p  p │      one a token
    sequences   └ decodes ──┴ prefills ─────────┘      a decode is a sequence with one row

Attention may treat the two kinds differently; every other layer sees rows only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Ints
from executor.slots.slots import Slots


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model needs of a step, on the host; T rows of S sequences.

    token_ids[T], positions[T] int32; slot_mapping[T] int64, where the row's KV goes: block * block_size + offset.
    slots[S] int32, whose rows they are: the num_decodes that have one, then the others. query_starts[S + 1] int32:
    sequence s owns the rows [query_starts[s], query_starts[s + 1]). context_lens[S] int32, this step's rows included.
    sample_rows[num_samples] int32 names the rows to make logits of: the last ones of the slots that reach their last
    known token, by ascending slot, and then those of `Slots.prompt_spans`.
    """

    token_ids: Ints
    positions: Ints
    slot_mapping: NDArray[np.int64]
    slots: Ints
    num_decodes: int
    query_starts: Ints
    context_lens: Ints
    sample_rows: Ints
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def build_batch(slots: Slots) -> Batch | None:
    """The batch of the slots' row counts; None if no slot computes anything."""
    counters, block_size = slots.counters, slots.limits.block_size
    computing, num_decodes = decodes_first(slots)
    if not computing.size:
        return None
    counts = counters.row_count[computing]
    query_starts = row_starts(counts)
    positions, row_slots = counters.num_computed_tokens[computing], computing
    if num_decodes < len(computing):
        row_slots = np.repeat(computing, counts)
        positions = np.repeat(positions - query_starts[:-1], counts) + np.arange(query_starts[-1], dtype=np.int32)
    blocks = slots.block_tables[row_slots, positions // block_size].astype(np.int64)
    return Batch(
        token_ids=slots.token_ids[row_slots, positions],
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        slots=computing,
        num_decodes=num_decodes,
        query_starts=query_starts,
        context_lens=counters.num_planned_tokens[computing],
        sample_rows=_sample_rows(slots, computing, query_starts),
        block_size=block_size,
    )


def decodes_first(slots: Slots) -> tuple[Ints, int]:
    """(slots that compute, in the order of their rows; how many of them are decodes)."""
    computing = slots.computing
    is_decode = slots.counters.row_count[computing] == 1
    num_decodes = int(np.count_nonzero(is_decode))
    if num_decodes < len(computing):
        computing = np.concatenate((computing[is_decode], computing[~is_decode]))
    return computing, num_decodes


def _sample_rows(slots: Slots, computing: Ints, query_starts: Ints) -> Ints:
    """computing[S] in the order of the rows."""
    last_row = np.empty(int(computing.max()) + 1, dtype=np.int32)
    last_row[computing] = query_starts[1:] - 1
    rows: Ints = last_row[slots.reaching]
    if (spans := slots.prompt_spans) is None:
        return rows
    first_rows = last_row[spans.slots] + 1 - slots.counters.row_count[spans.slots]
    return np.concatenate((rows, spans.following(first_rows)))


def row_starts(counts: Ints) -> Ints:
    """[0, c0, c0 + c1, …]."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
