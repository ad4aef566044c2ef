"""Attention over tiles of keys that lie in blocks: the loop that decode and prefill share.

Online softmax (Milakov and Gimelshein, 2018) as in FlashAttention (Dao et al., 2022), with log2(e) folded into the
scale so that powers of two suffice. Each row of queries carries a state over the tiles it has seen:

    greatest   the greatest score, -inf before the first
    totals     the sum of 2 ** (score - greatest)
    sums       the values, weighed by these

A tile spans several blocks, so each of its tokens finds its own block::

    table        │ 7 │ 2 │ 9 │ 4 │ …            blocks of 16 tokens
    tile         └─ 64 tokens ───┘              one gather of block ids, then rows of head_dim numbers
"""

import math

import torch
import triton.language as tl

from kernels.triton.jit import kernel

LOG2_E = math.log2(math.e)


def check(query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Raises TypeError for mixed dtypes, ValueError for layouts that the loop does not read and for scale <= 0."""
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
    """The state after the tokens [start, stop) of a context of `end` tokens.

    query[rows, padded head_dim], positions[rows]. keys: the first key of the kv head in block 0; its values lie
    num_kv_heads tiles further. scale: positive, log2(e) included. is_edge: some row does not see some token of the
    span; else nothing is masked, and stop - start is a multiple of tile_tokens.
    """
    dims = tl.arange(0, query.shape[1])
    within = tl.arange(0, tile_tokens)
    to_values: tl.constexpr = num_kv_heads * block_size * head_dim

    # The block ids of the next tile are read while this one is computed. The addresses of keys and values then depend
    # on a number that is there already, and the compiler can have several tiles of them under way; with the ids read
    # in place it overlaps one tile at most, whatever num_stages says.
    tokens = start + within
    next_blocks = tl.load(table + tokens // block_size, mask=tokens < end, other=0)
    for tile_start in range(start, stop, tile_tokens):
        tokens = tile_start + within
        blocks = next_blocks.to(tl.int64)  # times the size of a block they pass 2³¹
        following = tokens + tile_tokens
        next_blocks = tl.load(table + following // block_size, mask=following < end, other=0)

        rows = blocks * (2 * to_values) + (tokens % block_size) * head_dim
        places = keys + rows[:, None] + dims[None, :]
        if is_edge:
            held = (tokens < end)[:, None] & (dims < head_dim)[None, :]
            key = tl.load(places, mask=held, other=0.0)
            value = tl.load(places + to_values, mask=held, other=0.0)
        elif query.shape[1] != head_dim:
            held = (dims < head_dim)[None, :]
            key = tl.load(places, mask=held, other=0.0)
            value = tl.load(places + to_values, mask=held, other=0.0)
        else:
            key = tl.load(places)
            value = tl.load(places + to_values)

        # Scores keep the scale of the products until the exponent, where one fused operation applies it: the greatest
        # product has the greatest score. The operation is spelt out, so that the compiler rounds alike with a mask and
        # without, and a row has the same bits whichever of the two its tile takes.
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        if is_edge:
            seen = tokens[None, :] <= positions[:, None]
            if has_window:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            products = tl.where(seen, products, float("-inf"))
        now_greatest = tl.maximum(greatest, tl.max(products, 1) * scale)
        # A row that has seen nothing yet: its exponents must not become -inf + inf.
        base = tl.where(now_greatest == float("-inf"), 0.0, now_greatest)
        weights = tl.exp2(tl.fma(products, scale, -base[:, None]))
        fading = tl.exp2(greatest - base)
        totals = totals * fading + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fading[:, None], input_precision="ieee")
        greatest = now_greatest
    return greatest, totals, sums


@kernel()
def divided(sums: tl.tensor, totals: tl.tensor) -> tl.tensor:
    """The result of the rows: sums / totals, zeros for a row that saw nothing."""
    return sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
