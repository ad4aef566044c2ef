"""Norms, activation, rotation and copies of `kernels.cpu`, compared with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import cpu, reference
from tests.support.kernels.paged import assert_close, pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 512), (70, 1000), (33, 7), (0, 64), (64,), (2, 3, 5, 16)])
@pytest.mark.parametrize("threads", [1, 2])
def test_norms_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    x, residual = (torch.randn(2, *shape) * 3).to(dtype).unbind()
    weight = torch.randn(shape[-1]).to(dtype)
    result = cpu.rms_norm(x, weight, 1e-5)
    assert_close(result, reference.rms_norm(x, weight, 1e-5), roundings=2)

    summed = x + residual
    x_before = x.clone()
    expected = reference.rms_norm(summed, weight, 1e-5)
    assert_close(cpu.add_rms_norm(x, residual, weight, 1e-5), expected, roundings=2)
    assert torch.equal(residual, summed)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_inside_a_fused_projection(dtype: torch.dtype) -> None:
    fused = torch.randn(9, 8, 32).to(dtype)
    before = fused.clone()
    weight = torch.randn(32).to(dtype)
    heads = fused[:, 2:6]
    result = cpu.rms_norm(heads, weight, 1e-6)
    assert result.is_contiguous()
    assert_close(result, reference.rms_norm(heads, weight, 1e-6), roundings=2)
    assert torch.equal(fused, before)

    residual = torch.randn(9, 10, 32).to(dtype)
    summed = residual[:, 3:7] + heads
    outside = residual[:, :3].clone()
    cpu.add_rms_norm(heads, residual[:, 3:7], weight, 1e-6)
    assert torch.equal(residual[:, 3:7], summed)
    assert torch.equal(residual[:, :3], outside)


def test_norms_refuse_unsupported_layouts() -> None:
    with pytest.raises(ValueError, match="strides"):
        cpu.rms_norm(torch.randn(8, 4).t(), torch.randn(8), 1e-5)


@pytest.mark.parametrize("row", [0, 41, 69])
def test_a_norm_does_not_depend_on_other_rows(row: int) -> None:
    x, weight = torch.randn(70, 1000), torch.randn(1000)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5)[row], cpu.rms_norm(x[row : row + 1], weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (5, 1408), (200, 333), (70, 1000), (0, 16)])
@pytest.mark.parametrize("threads", [1, 2])
def test_activation_equals_the_reference(num_rows: int, width: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    gate_up = (torch.randn(num_rows, 2 * width) * 6).to(dtype)
    assert_close(cpu.silu_multiply(gate_up), reference.silu_multiply(gate_up), roundings=2)


def test_activation_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-torch.inf, -1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    result = cpu.silu_multiply(torch.cat((gate, torch.ones(10)))[None])[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    torch.testing.assert_close(result[1:], expected[1:], rtol=1e-5, atol=1e-7, equal_nan=True)


def test_activation_of_a_strided_row() -> None:
    wide = torch.randn(6, 100)
    part = wide[:, :64]
    assert_close(cpu.silu_multiply(part), reference.silu_multiply(part))


ROTATIONS = pairwise(
    head_dim=(16, 64, 80, 128),
    heads=((1, 1), (8, 2), (6, 3)),
    block_size=(8, 16, 5),
    dtype=DTYPES,
    num_tokens=(1, 7, 600),
    threads=(1, 2),
)


@pytest.mark.parametrize("case", ROTATIONS, ids=lambda case: "-".join(map(str, case.values())))
def test_rotate_and_store_equals_the_reference(case: dict[str, Any]) -> None:
    head_dim, (num_heads, num_kv_heads), block_size, dtype, num_tokens, threads = case.values()
    torch.set_num_threads(threads)
    total = num_heads + 2 * num_kv_heads
    fused = torch.randn(num_tokens, total * head_dim).to(dtype)
    angles = torch.randn(500, head_dim // 2)
    positions = torch.randint(0, 500, (num_tokens,), dtype=torch.int32)
    num_blocks = num_tokens // block_size + 3
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    pools = [torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), torch.nan).to(dtype) for _ in "ab"]
    projections = [fused.clone(), fused.clone()]
    for kernels, pool, projection in zip((cpu, reference), pools, projections, strict=True):
        heads = projection.view(num_tokens, total, head_dim)
        query, key, value = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        kernels.rotate_and_store(query, key, value, angles.cos(), angles.sin(), positions, pool, slots)
    assert_close(projections[0], projections[1])
    assert_close(pools[0], pools[1])
    key_and_value = slice(num_heads * head_dim, None)
    assert torch.equal(projections[0][:, key_and_value], fused[:, key_and_value])


def test_padding_rows_share_the_null_block() -> None:
    num_tokens = 300
    query, key, value = (torch.randn(num_tokens, heads, 64) for heads in (4, 2, 2))
    angles = torch.randn(10, 32)
    positions = torch.zeros(num_tokens, dtype=torch.int32)
    kv = torch.zeros(3, 2, 2, 16, 64)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    slots[5] = 33
    torch.set_num_threads(2)
    cpu.rotate_and_store(query, key, value, angles.cos(), angles.sin(), positions, kv, slots)
    assert torch.equal(kv[2, 1, :, 1], value[5])
    assert not kv[1].any()
    assert int(kv[2].ne(0).any(dim=-1).sum()) == 4  # two heads of a key and of a value


def test_block_ids_must_be_contiguous() -> None:
    pool = torch.zeros(1, 4, 2, 1, 4, 8)
    sources, destinations = torch.tensor([[1, 2], [1, 3]]).unbind(dim=1)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.copy_blocks(pool, sources, destinations)
    with pytest.raises(TypeError, match="int64"):
        cpu.copy_blocks(pool, torch.tensor([1]).int(), torch.tensor([2]).int())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [[], [(1, 2)], [(1, 2), (1, 3), (4, 6), (7, 5)]])
@pytest.mark.parametrize("threads", [1, 2])
def test_copy_blocks_equals_the_reference(copies: list[tuple[int, int]], dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    pool = torch.randn(5, 8, 2, 2, 16, 64).to(dtype)
    expected = pool.clone()
    sources, destinations = torch.tensor(copies, dtype=torch.int64).view(-1, 2).t().contiguous()
    reference.copy_blocks(expected, sources, destinations)
    cpu.copy_blocks(pool, sources, destinations)
    assert torch.equal(pool, expected)
