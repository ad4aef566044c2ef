"""One step's rows as flat arrays: decodes first, then prefills.

    rows        │ d │ d │ d │ p  p  p  p │ p  p │      one a token
    sequences   └ decodes ──┴ prefills ─────────┘      a decode is a sequence with one row

Attention treats the two kinds differently; every other layer sees rows only.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plan import Ints
from executor.slots import Slots


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """block_tables[S, M] int32, context_lens[S] int32, one row a sequence."""

    block_tables: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """block_tables[S, M], query_starts[S + 1], context_lens[S], all int32. Starts count from the first prefill row."""

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What the model needs of a step, on its device; T rows.

    token_ids[T] int32, positions[T] int32; slot_mapping[T] int64, where the row's KV goes: block * block_size + offset.
    sample_rows[num_samples] int64 names the rows to make logits of, by ascending slot; None: all rows, in order.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    num_decode_rows: int
    decode: DecodeRows | None
    prefill: PrefillRows | None
    sample_rows: Tensor | None


def build_batch(slots: Slots, device: torch.device) -> DeviceBatch | None:
    """The batch of the slots' row counts; None if no slot computes anything."""
    counters, block_size = slots.counters, slots.limits.block_size
    computing = slots.computing
    if not computing.size:
        return None
    is_decode = counters.row_count[computing] == 1
    decodes, prefills = computing[is_decode], computing[~is_decode]
    order = np.concatenate((decodes, prefills))
    counts = counters.row_count[order]
    starts = _starts(counts)

    row_slots = np.repeat(order, counts)
    positions = np.arange(starts[-1], dtype=np.int32)
    positions += np.repeat(counters.num_computed_tokens[order] - starts[:-1], counts)
    blocks = slots.block_tables[row_slots, positions // block_size].astype(np.int64)
    return DeviceBatch(
        token_ids=_tensor(slots.token_ids[row_slots, positions], device),
        positions=_tensor(positions, device),
        slot_mapping=_tensor(blocks * block_size + positions % block_size, device),
        num_decode_rows=len(decodes),
        decode=_decode_rows(slots, decodes, device),
        prefill=_prefill_rows(slots, prefills, device),
        sample_rows=_sample_rows(slots.sampling, order, starts, device),
    )


def _decode_rows(slots: Slots, decodes: Ints, device: torch.device) -> DecodeRows | None:
    if not decodes.size:
        return None
    context_lens = slots.counters.num_planned_tokens[decodes]
    return DecodeRows(
        block_tables=_tensor(_tables(slots, decodes, context_lens), device),
        context_lens=_tensor(context_lens, device),
    )


def _prefill_rows(slots: Slots, prefills: Ints, device: torch.device) -> PrefillRows | None:
    if not prefills.size:
        return None
    context_lens = slots.counters.num_planned_tokens[prefills]
    return PrefillRows(
        block_tables=_tensor(_tables(slots, prefills, context_lens), device),
        query_starts=_tensor(_starts(slots.counters.row_count[prefills]), device),
        context_lens=_tensor(context_lens, device),
    )


def _tables(slots: Slots, which: Ints, context_lens: Ints) -> Ints:
    """Rows of the block tables, as wide as the longest context needs. Beyond a row's own context: anything."""
    num_columns = -(-int(context_lens.max()) // slots.limits.block_size)
    return slots.block_tables[which, :num_columns]


def _sample_rows(sampling: Ints, order: Ints, starts: Ints, device: torch.device) -> Tensor | None:
    last_row = np.empty(int(order.max()) + 1, dtype=np.int64)
    last_row[order] = starts[1:] - 1
    rows = last_row[sampling]
    is_every_row = len(rows) == starts[-1] and bool((rows == np.arange(len(rows))).all())
    return None if is_every_row else _tensor(rows, device)


def _starts(counts: Ints) -> Ints:
    """[0, c0, c0 + c1, …]."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _tensor(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
