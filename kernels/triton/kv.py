"""Writes to the KV pool: the new tokens of a step, and copies of whole blocks."""

import torch
import triton.language as tl

from kernels.triton.jit import kernel, padded

_COPY_WORDS = 4096


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.Kernels.rotate_and_store`."""
    num_tokens, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    if not num_tokens:
        return
    if not query.dtype == key.dtype == value.dtype == kv.dtype:
        raise TypeError("query, key, value and kv must share a dtype")
    if not (kv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("kv, cos and sin must be contiguous")
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        raise ValueError("the last dimension of query, key and value must be contiguous")
    _rotate_and_store[(num_tokens, num_kv_heads)](
        query,
        key,
        value,
        cos,
        sin,
        positions,
        kv,
        slot_mapping,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        tile_heads=padded(num_heads // num_kv_heads),
        tile_half=padded(head_dim // 2),
        num_warps=1,
    )


def copy_blocks(pool: torch.Tensor, source_blocks: torch.Tensor, destination_blocks: torch.Tensor) -> None:
    """See `kernels.Kernels.copy_blocks`."""
    num_layers, num_blocks = pool.shape[:2]
    if not len(source_blocks):
        return
    words = pool.view(torch.int32)  # head_dim is even, so a head is a whole number of words in every dtype
    block_words = words[0, 0].numel()
    num_pieces = -(-block_words // _COPY_WORDS)
    _copy_blocks[(num_pieces, len(source_blocks), num_layers)](
        words,
        source_blocks,
        destination_blocks,
        num_blocks,
        block_words=block_words,
        tile_words=_COPY_WORDS,
        num_warps=4,
    )


@kernel(unspecialized=("positions", "slot_mapping"))
def _rotate_and_store(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    kv: tl.tensor,
    slot_mapping: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
) -> None:
    """Processes one token and one kv head: the query heads that read it, its key and its value."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = head_dim // 2
    dims = tl.arange(0, tile_half)
    in_half = dims < half
    position = tl.load(positions + token).to(tl.int64)
    cosines = tl.load(cos + position * half + dims, mask=in_half, other=0.0)
    sines = tl.load(sin + position * half + dims, mask=in_half, other=0.0)

    in_group = tl.arange(0, tile_heads)
    held = (in_group < group)[:, None] & in_half[None, :]
    heads = kv_head * group + in_group
    places = query + token * query_row_stride + heads[:, None] * query_head_stride + dims[None, :]
    low = tl.load(places, mask=held, other=0.0)
    high = tl.load(places + half, mask=held, other=0.0)
    rotated_low, rotated_high = _rotated(low, high, cosines[None, :], sines[None, :])
    tl.store(places, rotated_low, mask=held)
    tl.store(places + half, rotated_high, mask=held)

    token_slot = tl.load(slot_mapping + token)
    block, offset = token_slot // block_size, token_slot % block_size
    num_kv_heads = tl.num_programs(1)
    to_key = kv + ((block * 2 * num_kv_heads + kv_head) * block_size + offset) * head_dim + dims
    to_value = to_key + num_kv_heads * (block_size * head_dim)

    places = key + token * key_row_stride + kv_head * key_head_stride + dims
    low = tl.load(places, mask=in_half, other=0.0)
    high = tl.load(places + half, mask=in_half, other=0.0)
    rotated_low, rotated_high = _rotated(low, high, cosines, sines)
    tl.store(to_key, rotated_low, mask=in_half)
    tl.store(to_key + half, rotated_high, mask=in_half)

    places = value + token * value_row_stride + kv_head * value_head_stride + dims
    tl.store(to_value, tl.load(places, mask=in_half, other=0.0), mask=in_half)
    tl.store(to_value + half, tl.load(places + half, mask=in_half, other=0.0), mask=in_half)


@kernel()
def _rotated(low: tl.tensor, high: tl.tensor, cosines: tl.tensor, sines: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns the two halves of heads, rotated in float32 and rounded to their dtype."""
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    rotated_low = wide_low * cosines - wide_high * sines
    rotated_high = wide_high * cosines + wide_low * sines
    return rotated_low.to(low.dtype), rotated_high.to(low.dtype)


@kernel(unspecialized=("source_blocks", "destination_blocks", "num_blocks"))
def _copy_blocks(
    words: tl.tensor,
    source_blocks: tl.tensor,
    destination_blocks: tl.tensor,
    num_blocks: tl.tensor,
    block_words: tl.constexpr,
    tile_words: tl.constexpr,
) -> None:
    """Copies one piece of one block of one layer."""
    offsets = tl.program_id(0) * tile_words + tl.arange(0, tile_words)
    which = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64) * num_blocks
    source = words + (layer + tl.load(source_blocks + which)) * block_words
    destination = words + (layer + tl.load(destination_blocks + which)) * block_words
    held = offsets < block_words
    tl.store(destination + offsets, tl.load(source + offsets, mask=held), mask=held)
