"""Attention over tiles of keys stored in blocks: the loop that decode and prefill share.

Online softmax (Milakov and Gimelshein, 2018) as in FlashAttention (Dao et al., 2022), with log2(e) folded into the
scale so that powers of two suffice. Each row of queries has a state over the tiles it has seen:

    greatest   the greatest score, -inf before the first
    totals     the sum of 2 ** (score - greatest)
    sums       the sum of the values with these weights

A tile spans several blocks, so the block is looked up for each token of the tile::

    table        │ 7 │ 2 │ 9 │ 4 │ …            blocks of 16 tokens
    tile         └─ 64 tokens ───┘              one gather of block ids, then rows of head_dim numbers
"""

import math

import torch
import triton.language as tl

from kernels.triton.jit import kernel

LOG2_E = math.log2(math.e)


def check(query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Raises TypeError for mixed dtypes, and ValueError for layouts that the loop cannot read and for scale <= 0."""
    if not query.dtype == kv.dtype == out.dtype:
        raise TypeError(f"query, kv and out must share a dtype: {query.dtype}, {kv.dtype}, {out.dtype}")
    if not kv.is_contiguous():
        raise ValueError("kv must be contiguous")
    if query.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError("the last dimension of query and out must be contiguous")
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")


@kernel()
def attend_span(
    query: tl.tensor,
    greatest: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    lowest: tl.tensor,
    positions: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_tokens: tl.constexpr,
    is_edge: tl.constexpr,
    has_window: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the state after the tokens [start, stop) of a context of `end` tokens.

    query[rows, padded head_dim], positions[rows]. keys: the first key of the kv head in block 0; its values are
    num_kv_heads tiles further. scale: positive, includes log2(e). is_edge: some row may not see some token of the span;
    otherwise nothing is masked, and stop - start is a multiple of tile_tokens. lowest: with has_window, the first token
    that any row sees. Nothing below it is read: its block may belong to another sequence, or hold NaN.
    """
    dims = tl.arange(0, query.shape[1])
    within = tl.arange(0, tile_tokens)
    to_values: tl.constexpr = num_kv_heads * block_size * head_dim

    # The block ids of the next tile are loaded while this one is computed. The addresses of keys and values are then
    # known early, and the compiler can load several tiles at once; otherwise it overlaps at most one tile,
    # regardless of num_stages.
    tokens = start + within
    may_read = tokens < end
    if has_window:
        may_read = may_read & (tokens >= lowest)
    next_blocks = tl.load(table + tokens // block_size, mask=may_read, other=0)
    for tile_start in range(start, stop, tile_tokens):
        tokens = tile_start + within
        blocks = next_blocks.to(tl.int64)  # multiplied by the size of a block they can exceed 2³¹
        following = tokens + tile_tokens
        next_blocks = tl.load(table + following // block_size, mask=following < end, other=0)

        rows = blocks * (2 * to_values) + (tokens % block_size) * head_dim
        places = keys + rows[:, None] + dims[None, :]
        if is_edge:
            may_read = tokens < end
            if has_window:
                may_read = may_read & (tokens >= lowest)
            held = may_read[:, None] & (dims < head_dim)[None, :]
            key = tl.load(places, mask=held, other=0.0)
            value = tl.load(places + to_values, mask=held, other=0.0)
        elif query.shape[1] != head_dim:
            held = (dims < head_dim)[None, :]
            key = tl.load(places, mask=held, other=0.0)
            value = tl.load(places + to_values, mask=held, other=0.0)
        else:
            key = tl.load(places)
            value = tl.load(places + to_values)

        # The products are scaled only in the exponent, by one fused operation: scale is positive, so the greatest
        # product has the greatest score. The explicit fma makes the compiler round the same way with and without a
        # mask, so that a row has the same bits in either kind of tile.
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        if is_edge:
            seen = tokens[None, :] <= positions[:, None]
            if has_window:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            products = tl.where(seen, products, float("-inf"))
        now_greatest = tl.maximum(greatest, tl.max(products, 1) * scale)
        # For a row that has seen no token yet, the exponents must not become -inf + inf.
        base = tl.where(now_greatest == float("-inf"), 0.0, now_greatest)
        weights = tl.exp2(tl.fma(products, scale, -base[:, None]))
        fading = tl.exp2(greatest - base)
        totals = totals * fading + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fading[:, None], input_precision="ieee")
        greatest = now_greatest
    return greatest, totals, sums


@kernel()
def divided(sums: tl.tensor, totals: tl.tensor) -> tl.tensor:
    """Returns the result of the rows, sums / totals, with zeros for a row that saw no token."""
    return sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
