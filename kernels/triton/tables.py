"""Block tables that stay on the device: deltas go in, slots come out."""

import torch
import triton.language as tl

from kernels.triton.jit import kernel

_TILE = 256


def update_tables(block_tables: torch.Tensor, updates: torch.Tensor) -> None:
    """Writes updates[N, 3] int32, each (row, column, block), to block_tables[R, M] int32.

    No two updates name the same place: which of them would stay is not defined. Mutates block_tables.
    """
    num_updates = len(updates)
    if not num_updates:
        return
    if not updates.is_contiguous():
        raise ValueError("updates must be contiguous")
    _update_tables[(-(-num_updates // _TILE),)](
        block_tables, updates, num_updates, block_tables.stride(0), tile=_TILE, num_warps=4
    )


def map_slots(
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """slot_mapping[T] int64 of tokens: where position positions[t] of the table block_tables[table_rows[t]] lies.

    positions[T] int32, in tokens; -1 is a padding token, whose slot is 0, in the null block. table_rows[T] int32.
    Mutates slot_mapping.
    """
    num_tokens = len(positions)
    if not num_tokens:
        return
    _map_slots[(-(-num_tokens // _TILE),)](
        block_tables,
        table_rows,
        positions,
        slot_mapping,
        num_tokens,
        block_tables.stride(0),
        block_size=block_size,
        tile=_TILE,
        num_warps=4,
    )


@kernel(unspecialized=("block_tables", "updates", "num_updates", "table_stride"))
def _update_tables(
    block_tables: tl.tensor, updates: tl.tensor, num_updates: tl.tensor, table_stride: tl.tensor, tile: tl.constexpr
) -> None:
    which = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = which < num_updates
    rows = tl.load(updates + which * 3, mask=exists, other=0).to(tl.int64)
    columns = tl.load(updates + which * 3 + 1, mask=exists, other=0)
    blocks = tl.load(updates + which * 3 + 2, mask=exists, other=0)
    tl.store(block_tables + rows * table_stride + columns, blocks, mask=exists)


@kernel(unspecialized=("block_tables", "table_rows", "positions", "slot_mapping", "num_tokens", "table_stride"))
def _map_slots(
    block_tables: tl.tensor,
    table_rows: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    num_tokens: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    tokens = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = tokens < num_tokens
    own = tl.load(positions + tokens, mask=exists, other=-1)
    has_place = own >= 0
    rows = tl.load(table_rows + tokens, mask=has_place, other=0).to(tl.int64)
    blocks = tl.load(block_tables + rows * table_stride + own // block_size, mask=has_place, other=0)
    slots = blocks.to(tl.int64) * block_size + own % block_size
    tl.store(slot_mapping + tokens, tl.where(has_place, slots, 0), mask=exists)
