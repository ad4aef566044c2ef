"""Decode attention: a fixed number of programs process the step's work list, then split rows are merged.

See `kernels.triton.decode_work` for the list. A program takes the units pid, pid + num_programs, …. A unit is a chunk
and a kv head; the query heads of that kv head are the rows of one tile, so keys and values are read once for all::

    units        item 0: head 0 │ head 1 │ … │ item 1: head 0 │ …        neighbouring units read neighbouring memory
    programs     0                1        2 …  num_programs - 1, 0, 1 …

The number of programs depends on the device and the buffers, not on the lengths.
"""

import torch
import triton.language as tl

from kernels.interface import AttentionShape
from kernels.triton.decode_work import ITEM_FIELDS, MAX_CHUNKS, DecodePlanner, DecodeWork
from kernels.triton.jit import kernel, padded
from kernels.triton.tiles import LOG2_E, attend_span, check, divided
from kernels.triton.tuning import multiprocessors

_MERGE_PARTS = 16


def attend_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    work: DecodeWork,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """Runs one layer of `kernels.Kernels.attention_decode` for the rows that `work` was planned for.

    query[S, Hq, D] and out[S, Hq, D] may be strided views with a contiguous last dimension; window is one of the
    planner's. Launches two kernels, or one if no context can have two chunks.
    """
    if not work.num_rows:
        return
    check(query, kv, out, scale)
    num_rows, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    group, tuning, own = num_heads // num_kv_heads, work.tuning, work.lists[window]
    device = multiprocessors(query.device)
    num_programs = min(device.count * tuning.programs_per_multiprocessor, num_rows * work.max_chunks * num_kv_heads)
    _attend_chunks[(num_programs,)](
        query,
        kv,
        work.block_tables,
        own.items,
        own.num_items,
        out,
        work.parts,
        work.part_logs,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        work.block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        tile_rows=max(16, padded(group)),
        tile_tokens=tuning.tile_tokens,
        tile_dims=max(16, padded(head_dim)),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if work.max_chunks > 1:
        _merge_parts[(num_rows, num_heads)](
            work.parts,
            work.part_logs,
            own.first_items,
            out,
            out.stride(0),
            out.stride(1),
            num_heads=num_heads,
            head_dim=head_dim,
            max_chunks=MAX_CHUNKS,
            tile_parts=_MERGE_PARTS,
            tile_dims=padded(head_dim),
            num_warps=4,
        )


def attention_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """See `kernels.Kernels.attention_decode`. Plans for one call: layers that share a step share a `DecodeWork`."""
    num_rows, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    shape = AttentionShape(query.dtype, num_heads, num_kv_heads, head_dim, block_size)
    max_context_len = block_tables.shape[1] * block_size
    planner = DecodePlanner(shape, query.device, max(1, num_rows), max_context_len, (window,))
    attend_decode(query, kv, planner.plan(block_tables, context_lens), out, scale, window)


@kernel(unspecialized=("block_tables", "table_stride"))
def _attend_chunks(
    query: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_logs: tl.tensor,
    scale: tl.tensor,
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
) -> None:
    """Computes attention of chunks: writes whole rows to out, otherwise normalised parts and their logarithms."""
    in_group = tl.arange(0, tile_rows)
    dims = tl.arange(0, tile_dims)
    held = (in_group < group)[:, None] & (dims < head_dim)[None, :]
    num_units = tl.load(num_items) * num_kv_heads
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        index = unit // num_kv_heads
        kv_head = unit % num_kv_heads
        item = items + index * ITEM_FIELDS
        row = tl.load(item).to(tl.int64)
        table = block_tables + tl.load(item + 1).to(tl.int64) * table_stride
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        is_whole = tl.load(item + 4)

        heads = kv_head * group + in_group
        places = query + row * query_row_stride + heads[:, None] * query_head_stride + dims[None, :]
        greatest, totals, sums = attend_span(
            tl.load(places, mask=held, other=0.0),
            tl.full([tile_rows], float("-inf"), tl.float32),
            tl.zeros([tile_rows], tl.float32),
            tl.zeros([tile_rows, tile_dims], tl.float32),
            kv + kv_head * (block_size * head_dim),
            table,
            begin,
            end,
            end,
            0,
            tl.full([tile_rows], end - 1, tl.int32),
            0,
            scale,
            num_kv_heads,
            head_dim,
            block_size,
            tile_tokens,
            True,
            False,
        )
        result = divided(sums, totals)
        if is_whole != 0:
            places = out + row * out_row_stride + heads[:, None] * out_head_stride + dims[None, :]
            tl.store(places, result.to(out.dtype.element_ty), mask=held)
        else:
            slots = index.to(tl.int64) * (num_kv_heads * group) + heads
            tl.store(parts + slots[:, None] * head_dim + dims[None, :], result, mask=held)
            tl.store(part_logs + slots, greatest + tl.log2(totals), mask=in_group < group)


@kernel()
def _merge_parts(
    parts: tl.tensor,
    part_logs: tl.tensor,
    first_items: tl.tensor,
    out: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    max_chunks: tl.constexpr,
    tile_parts: tl.constexpr,
    tile_dims: tl.constexpr,
) -> None:
    """Writes one row and head of out: the mean of its parts, weighted by 2 ** log. Skips rows of one chunk."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(first_items + row)
    num_parts = tl.load(first_items + row + 1) - first
    if num_parts > 1:
        dims = tl.arange(0, tile_dims)
        own_parts = parts + (first.to(tl.int64) * num_heads + head) * head_dim
        own_logs = part_logs + first.to(tl.int64) * num_heads + head

        every = tl.arange(0, max_chunks)
        logs = tl.load(own_logs + every * num_heads, mask=every < num_parts, other=float("-inf"))
        greatest = tl.max(logs, 0)
        total = tl.sum(tl.exp2(logs - greatest), 0)
        merged = tl.zeros([tile_dims], tl.float32)
        for start in range(0, num_parts, tile_parts):
            some = start + tl.arange(0, tile_parts)
            exists = some < num_parts
            some_logs = tl.load(own_logs + some * num_heads, mask=exists, other=float("-inf"))
            held = exists[:, None] & (dims < head_dim)[None, :]
            places = own_parts + some[:, None] * (num_heads * head_dim) + dims[None, :]
            values = tl.load(places, mask=held, other=0.0)
            merged += tl.sum(tl.exp2(some_logs - greatest)[:, None] * values, 0)
        places = out + row.to(tl.int64) * out_row_stride + head * out_head_stride + dims
        tl.store(places, (merged / total).to(out.dtype.element_ty), mask=dims < head_dim)
