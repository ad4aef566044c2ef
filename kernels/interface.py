"""The operations of a decoder over a paged KV cache, as functions from tensors to tensors.

Every operation has one signature and several implementations:

* `kernels.reference`  plain torch on any device: the specification, which every test compares against
* `kernels.cpu`        numba; reads KV blocks in place
* `kernels.triton`     for GPUs; runs without one in Triton's interpreter

`select(device)` returns the implementation for a device: a module with the functions of `Kernels`. The functions for
sampling differ by device: `kernels.cpu.sample` and `rank`; `kernels.triton.choose_greedily` and `draw_tokens`.

The KV pool is one tensor::

    pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]         kv = pool[layer]

    kv[block]  ┌ 0: keys   ┌ kv head 0  ┌ token 0: head_dim numbers
               │           │            │ token 1
               │           │            └ …  block_size tokens, one contiguous tile per (block, head)
               │           └ kv head 1 …
               └ 1: values …

Token `i` of a sequence is stored in block `block_table[i // block_size]` at offset `i % block_size`; its *token slot*
is `block * block_size + offset`. Block 0 is the null block: padding rows write to it and nothing reads it.

Sizes in the docstrings: T tokens of the step, S sequences, M columns of the block tables, Hq query heads, Hkv kv
heads (Hq is a multiple of Hkv, query head h reads kv head `h // (Hq // Hkv)`), D head_dim, H hidden size,
P positions of the rotary tables, I intermediate size of the MLP.

Precision: the model's tensors (query, key, value, kv, x, weights, out) share one dtype, float32, bfloat16 or
float16. Sums, statistics and softmax are computed in float32; results are rounded once to the shared dtype unless
a docstring says otherwise. An operation never uses a table entry beyond the blocks that a context needs, nor a
token beyond the context: ids out of range or NaN there do not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that kernels are compiled for: one model with one KV block size.

    num_heads and num_kv_heads count the heads of one layer; num_heads is a multiple of num_kv_heads. head_dim is even.
    """

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Linear(Protocol):
    """Computes y = x Wᵀ + b, with the weight stored in the layout that the implementation multiplies fastest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the layer holds."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x[rows, in_size] to a new tensor[rows, out_size] of the same dtype. Sums are float32, rounded once.

        On the CPU a row does not depend on the other rows: its result has the same bits in every batch.
        """
        ...


Progress = Callable[[str, int, int], None]
"""Called before each variant is compiled, with its name, the number of variants done and the total number."""


class Kernels(Protocol):
    """The operations that every implementation provides. An operation mutates only what its docstring names.

    Implementations raise TypeError for dtypes and ValueError for layouts that they cannot read. They do not check
    values (block ids, positions, token slots); the caller has to. One-dimensional tensors, `kv`, `pool`, cos and sin
    are contiguous.
    """

    def rotate_and_store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rotates query in place, and writes the rotated key and the value to their token slots of `kv`.

        query[T, Hq, D], key[T, Hkv, D], value[T, Hkv, D]: may be strided views of one fused QKV output, the last
        dimension contiguous. cos[P, D/2], sin[P, D/2]: float32. positions[T] int32, in tokens, less than P.
        slot_mapping[T] int64: the token slot of each row. The token slots of a step are distinct, except that padding
        rows may share those of block 0.

        For each token slot t, mutates kv[t // block_size, :, :, t % block_size]. Mutates query; key and value are only
        read.

        Rotary embedding (Su et al., RoFormer, 2021) in the half-split layout: dimension i < D/2 pairs with i + D/2::

            out[i]       = x[i] * cos[p, i] - x[i + D/2] * sin[p, i]
            out[i + D/2] = x[i + D/2] * cos[p, i] + x[i] * sin[p, i]
        """
        ...

    def attention_decode(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int = 0,
    ) -> None:
        """Computes attention of one query per sequence, at position `context_len - 1`, over the sequence's KV.

        query[S, Hq, D] (last dimension contiguous), kv[num_blocks, 2, Hkv, block_size, D], block_tables[S, M] int32,
        context_lens[S] int32, in tokens, including the query's own token (its KV has already been stored).
        scale multiplies the dot products, usually D ** -0.5. window, in tokens: with 0 the query sees the whole
        context, otherwise the last `window` positions including its own: [max(0, context_len - window), context_len).

        Mutates all of out[S, Hq, D]. A row with context_len 0 is padding and becomes zeros.
        A row does not depend on the other rows: its result has the same bits in every batch.

        PagedAttention (Kwon et al., 2023), online softmax (Milakov and Gimelshein, 2018).
        """
        ...

    def attention_prefill(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int = 0,
    ) -> None:
        """Computes causal attention of several queries per sequence, over the cached prefix and the queries' tokens.

        Sequence s owns the rows [query_starts[s], query_starts[s + 1]) of query[T, Hq, D]; the last of them is at
        position context_lens[s] - 1, and the KV of all its tokens has already been stored::

            positions   0 ─────────── prefix ───────────┬──── queries ────┐
                                                         first            context_lens[s] (excluded)

        A query at position p sees the positions [0, p], or [max(0, p + 1 - window), p] if window > 0.
        query_starts[S + 1] int32, not decreasing, query_starts[0] is 0; block_tables[S, M] int32; context_lens[S]
        int32, each at least the sequence's number of queries. A sequence may have no queries.

        Mutates the rows [0, query_starts[S]) of out[T, Hq, D]; later rows are left unchanged.
        Decode is the case of one query per sequence. Tiled implementations follow FlashAttention (Dao et al., 2022).
        """
        ...

    def copy_blocks(self, pool: torch.Tensor, source_blocks: torch.Tensor, destination_blocks: torch.Tensor) -> None:
        """Copies whole blocks, keys and values of all layers: the copies of a copy-on-write.

        pool[num_layers, num_blocks, 2, Hkv, block_size, D]; source_blocks[N] and destination_blocks[N] int64.
        Destinations are distinct, and none of them is a source. Mutates pool[:, destination_blocks].
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / sqrt(mean(x²) + eps) * weight over the last dimension, as a new contiguous tensor.

        x[..., H] (last dimension contiguous), weight[H]. The statistics and the quotient are float32; the quotient is
        rounded to the dtype of x before the product with weight, as Llama does. Zhang and Sennrich, 2019.
        """
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to residual in place (rounded to its dtype) and returns `rms_norm(residual, weight, eps)`.

        x[..., H], residual[..., H], both with a contiguous last dimension, weight[H].
        """
        ...

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up as a new tensor[T, I]; gate_up[T, 2 I] holds gate in the first half of each row.

        silu(v) = v / (1 + exp(-v)), in float32, rounded to the dtype before the product. SwiGLU (Shazeer, 2020).
        """
        ...

    def pack_linear(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> Linear:
        """Makes one linear layer of one or several with the same input; their outputs are placed side by side.

        weights[i][out_i, in_size], biases[i][out_i], all of one dtype. They are not changed. The packed weights keep
        their exact values, in 16 bits if that is enough.
        """
        ...

    def warm_up(self, shape: AttentionShape, progress: Progress | None = None) -> None:
        """Compiles every variant that a model of this shape needs, so that no step has to compile anything."""
        ...
