"""The operations of a decoder over a paged KV cache: tensors in, tensors out.

Every operation has one signature and several homes:

* `kernels.reference`  plain torch on any device: the specification, and the oracle of every test
* `kernels.cpu`        numba, reading KV blocks where they lie
* `kernels.triton`     GPUs; in Triton's interpreter also without one

`select(device)` picks the home for a device. A home is a module with the functions of `Kernels`. Of sampling each
device has what suits it: `kernels.cpu.sample` and `rank`; `kernels.triton.choose_greedily` and `draw_tokens`.

The KV pool is one tensor::

    pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]         kv = pool[layer]

    kv[block]  ┌ 0: keys   ┌ kv head 0  ┌ token 0: head_dim numbers
               │           │            │ token 1
               │           │            └ …  block_size tokens, one contiguous tile a (block, head)
               │           └ kv head 1 …
               └ 1: values …

Token `i` of a sequence lies in block `block_table[i // block_size]` at offset `i % block_size`; its *slot*
is `block * block_size + offset`. Block 0 is the null block: padding rows write there, nobody reads it.

Sizes, as the docstrings name them: T tokens of the step, S sequences, M columns of the block tables,
Hq query heads, Hkv kv heads (Hq is a multiple of Hkv, query head h reads kv head `h // (Hq // Hkv)`),
D head_dim, H hidden size, P positions of the rotary tables, I intermediate size of the MLP.

Numbers: tensors of the model (query, key, value, kv, x, weights, out) share one dtype, float32, bfloat16 or
float16. Sums, statistics and softmax are kept in float32; results are rounded once to the shared dtype unless
a docstring says otherwise. An operation never looks at a table entry beyond the blocks that a context needs,
nor at a token beyond the context: whatever lies there, ids out of range or NaN, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the compiled variants of a home depend on: one model under one KV block size.

    num_heads and num_kv_heads count heads of one layer; num_heads is a multiple of num_kv_heads. head_dim is even.
    """

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Linear(Protocol):
    """y = x Wᵀ + b, with the weight in whatever form its home multiplies fastest."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x[rows, in_size] → a new tensor[rows, out_size] of the same dtype. Sums are float32, rounded once.

        On the CPU a row does not depend on the other rows: alone or in any batch it is the same to the last bit.
        """
        ...


Progress = Callable[[str, int, int], None]
"""Called before each variant is made ready: its name, how many are done, how many there are."""


class Kernels(Protocol):
    """The operations every home provides. Nothing but what a docstring names is mutated.

    Homes raise TypeError for dtypes and ValueError for layouts they cannot read. They do not check values (block ids,
    positions, slots): their caller has. One-dimensional tensors, `kv`, `pool`, cos and sin are contiguous.
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
        """Rotates query in place, and writes the rotated key and the value to their slots of `kv`.

        query[T, Hq, D], key[T, Hkv, D], value[T, Hkv, D]: may be strided views of one fused QKV output, the last
        dimension contiguous. cos[P, D/2], sin[P, D/2]: float32. positions[T] int32, in tokens, less than P.
        slot_mapping[T] int64; slots of a step are distinct, except that padding rows may share slots of block 0.

        Mutates query and kv[slot // block_size, :, :, slot % block_size]; key and value are only read.

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
        """Attention of one query a sequence, at position `context_len - 1`, over the sequence's KV.

        query[S, Hq, D] (last dimension contiguous), kv[num_blocks, 2, Hkv, block_size, D], block_tables[S, M] int32,
        context_lens[S] int32, in tokens, the query's own token included (its KV has been stored already).
        scale multiplies the dot products, usually D ** -0.5. window, in tokens: 0 sees the whole context, else the
        query sees the last `window` positions, its own included: [max(0, context_len - window), context_len).

        Mutates all of out[S, Hq, D]. A row with context_len 0 is padding: zeros are written.
        A row does not depend on the other rows: alone or in any batch it is the same to the last bit.

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
        """Causal attention of several queries a sequence, over cached prefix and own tokens alike.

        Sequence s owns the rows [query_starts[s], query_starts[s + 1]) of query[T, Hq, D]; the last of them is at
        position context_lens[s] - 1, and the KV of all its tokens has been stored already::

            positions   0 ─────────── prefix ───────────┬──── queries ────┐
                                                         first            context_lens[s] (excluded)

        A query at position p sees the positions [0, p], or [max(0, p + 1 - window), p] where window > 0.
        query_starts[S + 1] int32, rising, query_starts[0] is 0; block_tables[S, M] int32; context_lens[S] int32, each
        at least the sequence's number of queries. A sequence may have no queries.

        Mutates the rows [0, query_starts[S]) of out[T, Hq, D]; later rows are left as they are.
        Decode is the case of one query a sequence. FlashAttention (Dao et al., 2022) where tiled.
        """
        ...

    def copy_blocks(self, pool: torch.Tensor, source_blocks: torch.Tensor, destination_blocks: torch.Tensor) -> None:
        """Copies whole blocks, keys and values of all layers: the effect of a copy-on-write.

        pool[num_layers, num_blocks, 2, Hkv, block_size, D]; source_blocks[N] and destination_blocks[N] int64.
        Destinations are distinct, and none of them is a source. Mutates pool[:, destination_blocks].
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension; a new contiguous tensor shaped as x.

        x[..., H] (last dimension contiguous), weight[H]. The statistics and the quotient are float32; the quotient is
        rounded to the dtype of x before the product with weight, as Llama does. Zhang and Sennrich, 2019.
        """
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place (rounded to its dtype), then `rms_norm(residual, weight, eps)` as a new tensor.

        x[..., H], residual[..., H], both with a contiguous last dimension, weight[H].
        """
        ...

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up as a new tensor[T, I], where gate_up[T, 2 I] holds gate in the first half of each row.

        silu(v) = v / (1 + exp(-v)), in float32, rounded to the dtype before the product. SwiGLU (Shazeer, 2020).
        """
        ...

    def pack_linear(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> Linear:
        """A linear layer; or several with the same input as one, whose output is the outputs of all, side by side.

        weights[i][out_i, in_size], biases[i][out_i], all of one dtype. None of them is changed; what they say is kept
        exactly, in 16 bits where those are enough.
        """
        ...

    def warm_up(self, shape: AttentionShape, progress: Progress | None = None) -> None:
        """Makes every variant ready that a model of this shape needs, so that no step compiles anything."""
        ...


def select(device: torch.device) -> Kernels:
    """The home for tensors on `device`: numba on the CPU, Triton on a GPU, the reference anywhere else.

    Homes are imported when they are selected: numba costs a CPU host a third of a second, another host nothing.
    """
    if device.type == "cpu":
        from kernels import cpu

        return cpu
    if device.type == "cuda":
        from kernels import triton

        return triton
    from kernels import reference

    return reference
