"""The reference implementation, compared with torch and transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels import reference
from tests.support.kernels.paged import gathered, paged, poisoned


def sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """Returns torch's attention of query[N, Hq, D] at the end of keys[L, Hkv, D]."""
    num_queries, length = query.shape[0], keys.shape[0]
    distance = torch.arange(length - num_queries, length).unsqueeze(1) - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length + 1))
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


@pytest.mark.parametrize("window", [0, 1, 5, 20])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (2, 4), (3, 2)])
def test_attention_is_scaled_dot_product_attention(num_kv_heads: int, group: int, window: int) -> None:
    head_dim, contexts, num_queries = 16, [1, 7, 8, 0, 21], [1, 3, 8, 0, 1]
    pool = paged(contexts, num_kv_heads=num_kv_heads, block_size=8, head_dim=head_dim)
    starts = torch.tensor([0, *num_queries]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), num_kv_heads * group, head_dim)
    out = poisoned(*query.shape)
    reference.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, out, 0.3, window)
    decoded = poisoned(len(contexts), num_kv_heads * group, head_dim)
    last = query[(starts[1:].long() - 1).clamp(min=0)]
    reference.attention_decode(last, pool.kv, pool.block_tables, pool.context_lens, decoded, 0.3, window)

    for s, context_len in enumerate(contexts):
        if context_len == 0:
            assert torch.equal(decoded[s], torch.zeros_like(decoded[s]))
            continue
        rows = slice(int(starts[s]), int(starts[s + 1]))
        expected = sdpa(query[rows], *gathered(pool, s), 0.3, window)
        torch.testing.assert_close(out[rows], expected)
        torch.testing.assert_close(decoded[s], expected[-1])


def test_prefill_does_not_change_padding_rows() -> None:
    pool = paged([5], num_kv_heads=1, block_size=4, head_dim=8)
    query, out = torch.randn(7, 2, 8), poisoned(7, 2, 8)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    reference.attention_prefill(query, pool.kv, pool.block_tables, starts, pool.context_lens, out, 1.0)
    assert out[:5].isfinite().all()
    assert out[5:].isnan().all()


def test_rotation_equals_transformers() -> None:
    num_tokens, head_dim = 6, 16
    query, key, value = (torch.randn(num_tokens, heads, head_dim) for heads in (4, 2, 2))
    angles = torch.randn(30, head_dim // 2)
    positions = torch.randint(0, 30, (num_tokens,), dtype=torch.int32)
    rows = torch.cat((angles, angles), dim=-1)[positions][None]
    expected_query, expected_key = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], rows.cos(), rows.sin()
    )
    kv = torch.zeros(3, 2, 2, 4, head_dim)
    slots = torch.tensor([4, 5, 9, 11, 6, 8])
    reference.rotate_and_store(query, key, value, angles.cos(), angles.sin(), positions, kv, slots)
    torch.testing.assert_close(query, expected_query[0].transpose(0, 1))
    for token, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(kv[slot // 4, 0, :, slot % 4], expected_key[0, :, token])
        torch.testing.assert_close(kv[slot // 4, 1, :, slot % 4], value[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_those_of_llama(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach()
    x, residual = torch.randn(2, 5, 48).to(dtype).unbind()
    summed = x + residual
    with torch.no_grad():
        torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), norm(x), rtol=0, atol=0)
        added = reference.add_rms_norm(x, residual, weight, 1e-5)
        torch.testing.assert_close(added, norm(summed), rtol=0, atol=0)
    assert torch.equal(residual, summed)


def test_activation_equals_that_of_llama() -> None:
    gate, up = torch.randn(2, 5, 24).unbind()
    expected = ACT2FN["silu"](gate) * up
    torch.testing.assert_close(reference.silu_multiply(torch.cat((gate, up), dim=-1)), expected)


def test_copies_reach_every_layer() -> None:
    pool = torch.randn(3, 6, 2, 1, 4, 8)
    before = pool.clone()
    reference.copy_blocks(pool, torch.tensor([1, 1, 4]), torch.tensor([2, 3, 5]))
    assert torch.equal(pool[:, [2, 3, 5]], before[:, [1, 1, 4]])
    assert torch.equal(pool[:, [0, 1, 4]], before[:, [0, 1, 4]])
