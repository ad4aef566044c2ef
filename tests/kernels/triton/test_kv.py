"""Writes to the KV pool and to block tables on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels import triton as triton_kernels
from tests.support.kernels.paged import pairwise
from tests.support.triton.places import DEVICE, DTYPES, assert_rounded

ROTATIONS = pairwise(
    head_dim=(16, 64, 80, 96, 128, 256),
    heads=((1, 1), (8, 2), (6, 3), (14, 2)),
    block_size=(8, 16, 32, 5),
    dtype=DTYPES,
    num_tokens=(1, 20),
)


@pytest.mark.parametrize("case", ROTATIONS, ids=lambda case: "-".join(map(str, case.values())))
def test_rotate_and_store_equals_the_reference(case: dict[str, Any]) -> None:
    """Query, key and value are views of a fused projection; other token slots are NaN and must not change."""
    head_dim, (num_heads, num_kv_heads), block_size, dtype, num_tokens = case.values()
    total = num_heads + 2 * num_kv_heads
    fused = torch.randn(num_tokens, total * head_dim).to(dtype).to(DEVICE)
    angles = torch.randn(500, head_dim // 2, device=DEVICE)
    positions = torch.randint(0, 500, (num_tokens,), dtype=torch.int32).to(DEVICE)
    num_blocks = num_tokens // block_size + 3
    slots = (torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size).to(DEVICE)
    empty = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    pools, projections = [empty.clone(), empty.clone()], [fused.clone(), fused.clone()]
    for kernels, pool, projection in zip((triton_kernels, reference), pools, projections, strict=True):
        heads = projection.view(num_tokens, total, head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        kernels.rotate_and_store(query, key, value, angles.cos(), angles.sin(), positions, pool, slots)
    assert_rounded(projections[0], projections[1])
    assert_rounded(pools[0], pools[1])
    key_and_value = slice(num_heads * head_dim, None)
    assert torch.equal(projections[0][:, key_and_value], fused[:, key_and_value])


def test_padding_rows_share_the_null_block() -> None:
    query, key, value = (torch.randn(9, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    angles = torch.randn(10, 32, device=DEVICE)
    kv = torch.zeros(3, 2, 2, 16, 64, device=DEVICE)
    slots = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    slots[5] = 33
    positions = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    triton_kernels.rotate_and_store(query, key, value, angles.cos(), angles.sin(), positions, kv, slots)
    assert torch.equal(kv[2, 1, :, 1], value[5])
    assert not kv[1].any()
    assert int(kv[2].ne(0).any(dim=-1).sum()) == 4  # two heads of a key and of a value


def test_unsupported_layouts_are_refused() -> None:
    query, key, value = (torch.randn(3, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    table, kv = torch.randn(10, 32, device=DEVICE), torch.zeros(3, 2, 2, 16, 64, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(16, 19, device=DEVICE)
    turned = torch.randn(3, 64, 2, device=DEVICE).transpose(1, 2)
    with pytest.raises(TypeError, match="dtype"):
        triton_kernels.rotate_and_store(query, key.half(), value, table, table, positions, kv, slots)
    with pytest.raises(ValueError, match="last dimension"):
        triton_kernels.rotate_and_store(query, key, turned, table, table, positions, kv, slots)
    with pytest.raises(ValueError, match="kv, cos and sin"):
        triton_kernels.rotate_and_store(query, key, value, table[:, ::2], table, positions, kv, slots)
    assert not kv.any()


def test_no_tokens_change_nothing() -> None:
    query, key, value = (torch.randn(0, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    table, kv = torch.randn(10, 32, device=DEVICE), torch.zeros(3, 2, 2, 16, 64, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    triton_kernels.rotate_and_store(query, key, value, table, table, none, kv, none.long())
    assert not kv.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [[], [(1, 2)], [(1, 2), (1, 3), (4, 6), (7, 5)]])
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (5, 10), (32, 256)])
def test_copy_blocks_equals_the_reference(
    copies: list[tuple[int, int]], dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    pool = torch.randn(3, 8, 2, 2, block_size, head_dim).to(dtype).to(DEVICE)
    expected = pool.clone()
    pairs = torch.tensor(copies, dtype=torch.int64, device=DEVICE).view(-1, 2)
    sources, destinations = pairs.unbind(dim=1)
    reference.copy_blocks(expected, sources, destinations)
    triton_kernels.copy_blocks(pool, sources.contiguous(), destinations.contiguous())
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("num_updates", [0, 1, 255, 257, 600])
def test_update_tables_writes_the_entries(num_updates: int) -> None:
    wide = torch.full((40, 50), -1, dtype=torch.int32, device=DEVICE)
    tables = wide[:, :30]
    places = torch.randperm(40 * 30)[:num_updates]
    updates = torch.stack((places // 30, places % 30, torch.randint(1, 99, (num_updates,))), dim=1)
    expected = tables.clone()
    expected[updates[:, 0], updates[:, 1]] = updates[:, 2].int().to(DEVICE)
    triton_kernels.update_tables(tables, updates.int().to(DEVICE))
    assert torch.equal(tables, expected)
    assert (wide[:, 30:] == -1).all()
