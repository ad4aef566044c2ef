"""Products in matrix registers, on processors that have them: their order, which vectors repeat for a few rows."""

from __future__ import annotations

import pytest
import torch

from kernels import cpu
from kernels.cpu import amx
from kernels.cpu.native import BFLOAT16, FLOAT16, FLOAT32
from kernels.cpu.panels import MAX_ROWS, PANEL, row_format, tile_rows
from tests.support.kernels.paged import paged, poisoned

needs_amx = pytest.mark.skipif(not amx.HAS_AMX, reason="the processor has no matrix registers")

SMALLEST = 2.0**-126  # of float32 and of bfloat16, without denormals


def in_documented_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x · weightᵀ as the instruction computes it. Products of two bfloat16 are exact in float32."""
    x, weight = x.float(), weight.float()
    total = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], amx.BLOCK):
        halves = [torch.zeros_like(total), torch.zeros_like(total)]
        for i in range(first, first + amx.BLOCK):
            halves[i % 2] += x[:, i, None] * weight[None, :, i]
        total += halves[0] + halves[1]
    return total


@needs_amx
@pytest.mark.parametrize("in_size", [amx.BLOCK, 3 * amx.BLOCK, 2112])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 50, 129, 200])
def test_linear_layers_add_in_the_documented_order(num_rows: int, in_size: int) -> None:
    x, weight = torch.randn(num_rows, in_size).bfloat16(), torch.randn(PANEL + 5, in_size).bfloat16()
    assert torch.equal(cpu.pack_linear([weight])(x), in_documented_order(x, weight).bfloat16())


@needs_amx
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("head_dim", "group"), [(32, 1), (64, 2), (96, 3), (128, 4), (64, 8), (128, 16)])
def test_a_query_alone_has_the_bits_of_its_prompt(head_dim: int, group: int, num_threads: int) -> None:
    """Few rows are multiplied by vectors, the rows of a prompt in matrix registers. Some numbers are denormal."""
    torch.set_num_threads(num_threads)
    num_tokens = 700
    pool = paged([num_tokens], num_kv_heads=2, block_size=16, head_dim=head_dim, dtype=torch.bfloat16)
    pool.kv[:, :, :, ::5] *= SMALLEST / 4
    query = torch.randn(num_tokens, 2 * group, head_dim).bfloat16()
    query[:, :, ::3] *= SMALLEST / 2
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    whole, alone = poisoned(*query.shape, dtype=torch.bfloat16), poisoned(1, 2 * group, head_dim, dtype=torch.bfloat16)
    cpu.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, whole, 8.0)
    for token in (0, 1, 31, 64, 511, 512, 699):
        seen = torch.tensor([token + 1], dtype=torch.int32)
        cpu.attention_decode(query[token : token + 1], pool.kv, pool.block_tables, seen, alone, 8.0)
        assert torch.equal(alone[0], whole[token]), token


@needs_amx
def test_vectors_keep_denormals_after_attention() -> None:
    pool = paged([40], num_kv_heads=1, block_size=16, head_dim=64, dtype=torch.bfloat16)
    query, out = torch.randn(1, 1, 64).bfloat16(), poisoned(1, 1, 64, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    cpu.attention_decode(query, pool.kv, pool.block_tables, pool.context_lens, out, 0.125)
    assert bool((torch.full((64,), SMALLEST) * 0.5 > 0).all())


def test_the_format_of_rows_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_amx, has_dots in ((True, True), (True, False), (False, True), (False, False)):
        monkeypatch.setattr("kernels.cpu.panels.HAS_AMX", has_amx)
        monkeypatch.setattr("kernels.cpu.panels.HAS_BFLOAT16_DOTS", has_dots)
        otherwise = BFLOAT16 if has_dots else FLOAT32
        assert row_format(BFLOAT16, BFLOAT16, 4 * amx.BLOCK) == (amx.MATRIX if has_amx else otherwise)
        assert row_format(BFLOAT16, BFLOAT16, 80) == otherwise
        assert {row_format(FLOAT32, BFLOAT16, 64), row_format(FLOAT16, FLOAT16, 64)} == {FLOAT32}
    assert (tile_rows(amx.MATRIX), tile_rows(BFLOAT16), tile_rows(FLOAT32)) == (amx.ROWS, MAX_ROWS, MAX_ROWS)


def test_without_permission_nothing_is_multiplied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some containers forbid the call that asks for the registers."""
    monkeypatch.setattr(amx, "_FEATURES", ())
    monkeypatch.setattr(amx, "_REQUEST_PERMISSION", 0xFFFF)
    assert amx._is_permitted() is False
