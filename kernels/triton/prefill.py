"""Prefill attention: a program processes a tile of queries of one sequence, with all heads that read one kv head.

With the whole group in the tile, each key is read once for all heads, and short prompts fill their tiles::

    tile rows    query 0: head 0 │ head 1 │ … │ query 1: head 0 │ …        tile_rows // group queries

The keys of a tile are processed in three spans, in order, so that only the edges need masks::

    window's edge     full tiles      diagonal
    ├─── masked ───┼─── unmasked ───┼─ masked ─┤ end
                                     first query … last query

Tiles of keys begin at multiples of tile_tokens, and masked tokens do not change a result: a row has the same bits
in any split of its prompt into steps.

The host, which knows the lengths, makes the list of tiles once per step. The longest tiles come first, so that the
programs that finish last are short ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from kernels.interface import AttentionShape
from kernels.triton.jit import kernel, padded
from kernels.triton.tiles import LOG2_E, attend_span, check, divided
from kernels.triton.tuning import PrefillTuning, prefill_tuning

_ITEM_FIELDS: tl.constexpr = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefills of one step, for all layers with any windows.

    block_tables[R, M] int32. items[num_items, 4] int32, each a tile of queries: table row, first row of query, number
    of rows, position of the first row.
    """

    block_tables: torch.Tensor
    items: torch.Tensor
    tuning: PrefillTuning


def plan_prefill(
    shape: AttentionShape,
    block_tables: torch.Tensor,
    query_starts: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    table_rows: NDArray[np.int32] | None = None,
) -> PrefillWork:
    """Returns the work for query_starts[S + 1] and context_lens[S], both host arrays.

    They are those of `kernels.Kernels.attention_prefill`. Sequence s reads block_tables[table_rows[s]], or
    block_tables[s] without table_rows[S]. Makes one copy to the device.
    """
    device = block_tables.device
    items = torch.from_numpy(list_tiles(shape, device, query_starts, context_lens, table_rows))
    return PrefillWork(block_tables, items.to(device, non_blocking=True), prefill_tuning(shape, device))


def list_tiles(
    shape: AttentionShape,
    device: torch.device,
    query_starts: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    table_rows: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Returns the items of a `PrefillWork` on the host, for callers that copy them to the device themselves."""
    tuning = prefill_tuning(shape, device)
    group = shape.num_heads // shape.num_kv_heads
    tile_queries = _tile_rows(tuning, group) // group
    num_queries = np.diff(query_starts)
    num_tiles = -(-num_queries // tile_queries)
    sequences = np.repeat(np.arange(len(num_queries)), num_tiles)
    before = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    offsets = (np.arange(len(sequences)) - before) * tile_queries

    items = np.empty((len(sequences), _ITEM_FIELDS.value), dtype=np.int32)
    items[:, 0] = sequences if table_rows is None else table_rows[sequences]
    items[:, 1] = query_starts[sequences] + offsets
    items[:, 2] = np.minimum(tile_queries, num_queries[sequences] - offsets)
    items[:, 3] = context_lens[sequences] - num_queries[sequences] + offsets
    longest_first = np.argsort(-(items[:, 2] + items[:, 3]), kind="stable")
    ordered: NDArray[np.int32] = items[longest_first]
    return ordered


def attend_prefill(
    query: torch.Tensor,
    kv: torch.Tensor,
    work: PrefillWork,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """Runs one layer of `kernels.Kernels.attention_prefill` for the rows that `work` was planned for.

    query[T, Hq, D] and out[T, Hq, D] may be strided views with a contiguous last dimension.
    """
    if not len(work.items):
        return
    check(query, kv, out, scale)
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    group, tuning = num_heads // num_kv_heads, work.tuning
    _attend_tiles[(len(work.items) * num_kv_heads,)](
        query,
        kv,
        work.block_tables,
        work.items,
        out,
        scale * LOG2_E,
        window,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        work.block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        tile_rows=_tile_rows(tuning, group),
        tile_tokens=tuning.tile_tokens,
        tile_dims=max(16, padded(head_dim)),
        has_window=window > 0,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def attention_prefill(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """See `kernels.Kernels.attention_prefill`. Plans for one call, and waits for the device to read the lengths."""
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    shape = AttentionShape(query.dtype, num_heads, num_kv_heads, head_dim, block_size)
    starts, lengths = query_starts.cpu().numpy(), context_lens.cpu().numpy()
    work = plan_prefill(shape, block_tables, starts, lengths)
    attend_prefill(query, kv, work, out, scale, window)


def _tile_rows(tuning: PrefillTuning, group: int) -> int:
    """Returns the number of rows of a tile: at least one query token with all heads of the group."""
    return max(tuning.tile_rows, padded(group))


@kernel(unspecialized=("block_tables", "table_stride", "window"))
def _attend_tiles(
    query: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_dims: tl.constexpr,
    has_window: tl.constexpr,
) -> None:
    """Computes attention of one item and one kv head."""
    item = items + (tl.program_id(0) // num_kv_heads) * _ITEM_FIELDS
    kv_head = tl.program_id(0) % num_kv_heads
    table = block_tables + tl.load(item).to(tl.int64) * table_stride
    first_row = tl.load(item + 1)
    num_rows = tl.load(item + 2)
    first = tl.load(item + 3)
    end = first + num_rows

    in_tile = tl.arange(0, tile_rows) // group
    dims = tl.arange(0, tile_dims)
    held = (in_tile < num_rows)[:, None] & (dims < head_dim)[None, :]
    rows = (first_row + in_tile).to(tl.int64)
    heads = kv_head * group + tl.arange(0, tile_rows) % group
    places = query + (rows * query_row_stride + heads * query_head_stride)[:, None] + dims[None, :]
    tile = tl.load(places, mask=held, other=0.0)
    positions = first + in_tile
    keys = kv + kv_head * (block_size * head_dim)

    greatest = tl.full([tile_rows], float("-inf"), tl.float32)
    totals = tl.zeros([tile_rows], tl.float32)
    sums = tl.zeros([tile_rows, tile_dims], tl.float32)
    # Every row sees the tokens [full_start, full_stop).
    full_start = 0
    lowest = 0
    full_stop = (first + 1) // tile_tokens * tile_tokens
    if has_window:
        lowest = tl.maximum(first + 1 - window, 0)
        start = lowest // tile_tokens * tile_tokens
        last_start = tl.maximum(end - window, 0)
        full_start = tl.minimum((last_start + tile_tokens - 1) // tile_tokens * tile_tokens, full_stop)
        greatest, totals, sums = attend_span(
            tile,
            greatest,
            totals,
            sums,
            keys,
            table,
            start,
            full_start,
            end,
            lowest,
            positions,
            window,
            scale,
            num_kv_heads,
            head_dim,
            block_size,
            tile_tokens,
            True,
            True,
        )
    greatest, totals, sums = attend_span(
        tile,
        greatest,
        totals,
        sums,
        keys,
        table,
        full_start,
        full_stop,
        end,
        lowest,
        positions,
        window,
        scale,
        num_kv_heads,
        head_dim,
        block_size,
        tile_tokens,
        False,
        False,
    )
    greatest, totals, sums = attend_span(
        tile,
        greatest,
        totals,
        sums,
        keys,
        table,
        full_stop,
        end,
        end,
        lowest,
        positions,
        window,
        scale,
        num_kv_heads,
        head_dim,
        block_size,
        tile_tokens,
        True,
        has_window,
    )
    places = out + (rows * out_row_stride + heads * out_head_stride)[:, None] + dims[None, :]
    tl.store(places, divided(sums, totals).to(out.dtype.element_ty), mask=held)
