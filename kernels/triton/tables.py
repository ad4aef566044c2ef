"""Updates of block tables that stay on the device."""

import torch
import triton.language as tl

from kernels.triton.jit import kernel

_TILE = 256


def update_tables(block_tables: torch.Tensor, updates: torch.Tensor) -> None:
    """Writes updates[N, 3] int32, each (row, column, block), to block_tables[R, M] int32.

    No two updates may name the same entry: it is not defined which of them would win. Mutates block_tables.
    """
    num_updates = len(updates)
    if not num_updates:
        return
    if not updates.is_contiguous():
        raise ValueError("updates must be contiguous")
    _update_tables[(-(-num_updates // _TILE),)](
        block_tables, updates, num_updates, block_tables.stride(0), tile=_TILE, num_warps=4
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
