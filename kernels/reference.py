"""Every operation in plain torch: the specification that the other implementations are tested against.

Signatures, shapes and layouts are those of `kernels.Kernels`. The code is written for reading, computes in float32 and
runs on any device. Attention gathers the KV of each sequence in turn, which copies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.interface import AttentionShape, Progress


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A linear layer that multiplies the unpacked weight[out_size, in_size] with torch."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """See `kernels.Linear`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `kernels.Linear`."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def pack_linear(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> DenseLinear:
    """See `kernels.Kernels.pack_linear`."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    return DenseLinear(weight, torch.cat(list(biases)) if biases else None)


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
    """See `Kernels.rotate_and_store`."""
    token_cos = cos[positions].unsqueeze(1)
    token_sin = sin[positions].unsqueeze(1)
    block_size = kv.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    query.copy_(_rotate(query, token_cos, token_sin))
    kv[blocks, 0, :, offsets] = _rotate(key, token_cos, token_sin)
    kv[blocks, 1, :, offsets] = value


def attention_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """See `Kernels.attention_decode`."""
    for s, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            out[s] = 0
        else:
            out[s : s + 1] = _attend(query[s : s + 1], kv, block_tables[s], context_len, scale, window)


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
    """See `Kernels.attention_prefill`."""
    starts = query_starts.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.start < rows.stop:
            out[rows] = _attend(query[rows], kv, block_tables[s], context_len, scale, window)


def copy_blocks(pool: torch.Tensor, source_blocks: torch.Tensor, destination_blocks: torch.Tensor) -> None:
    """See `Kernels.copy_blocks`."""
    pool[:, destination_blocks] = pool[:, source_blocks]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Kernels.rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).contiguous()


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Kernels.add_rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Kernels.silu_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


def warm_up(shape: AttentionShape, progress: Progress | None = None) -> None:
    """Does nothing: the reference has nothing to compile."""


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x[T, heads, D] rotated by cos[T, 1, D/2] and sin[T, 1, D/2], in the dtype of x."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def _attend(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Returns causal attention of query[N, Hq, D], at positions [context_len - N, context_len) of one sequence."""
    num_queries, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv.shape
    num_blocks = -(-context_len // block_size)
    own = kv[block_table[:num_blocks].long()].transpose(1, 3).reshape(-1, num_kv_heads, 2, head_dim)
    keys, values = own[:context_len].float().unbind(dim=2)

    grouped = query.float().reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, keys) * scale
    key_positions = torch.arange(context_len, device=query.device)
    query_positions = key_positions[context_len - num_queries :].unsqueeze(1)
    visible = key_positions <= query_positions
    if window:
        visible &= key_positions > query_positions - window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    attended = torch.einsum("kgnl,lkd->nkgd", weights, values)
    return attended.reshape(num_queries, num_heads, head_dim).to(query.dtype)
