"""Sequences in a KV pool in which everything that must not be read is NaN or an invalid block id."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_BLOCK = 2**31 - 1  # an id far outside of any pool: using it crashes

_RELATIVE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True, slots=True)
class Paged:
    """A pool of one layer, kv[num_blocks, 2, Hkv, block_size, D], with sequences of given lengths in random blocks."""

    kv: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor


def paged(
    context_lens: Sequence[int],
    *,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    spare_columns: int = 2,
) -> Paged:
    """Returns a pool with random KV for the tokens of each context.

    All other token slots are NaN, and all other entries of the tables are ids out of range.
    """
    sizes = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(sizes) + 3
    kv = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    blocks = iter((torch.randperm(num_blocks - 1) + 1).tolist())
    tables = torch.full((len(sizes), max(sizes, default=0) + spare_columns), NO_BLOCK, dtype=torch.int32)
    for s, (length, size) in enumerate(zip(context_lens, sizes, strict=True)):
        for column in range(size):
            block = next(blocks)
            used = min(block_size, length - column * block_size)
            tables[s, column] = block
            kv[block, :, :, :used] = torch.randn(2, num_kv_heads, used, head_dim).to(dtype)
    return Paged(kv, tables, torch.tensor(context_lens, dtype=torch.int32))


def gathered(pool: Paged, s: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of sequence s, each [context_len, Hkv, D]."""
    length, block_size = int(pool.context_lens[s]), pool.kv.shape[3]
    tokens = [pool.kv[int(pool.block_tables[s, i // block_size]), :, :, i % block_size] for i in range(length)]
    keys, values = torch.stack(tokens).unbind(dim=1)
    return keys, values


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns an output buffer of NaN, which a kernel has to overwrite."""
    return torch.full(shape, torch.nan, dtype=dtype)


def pairwise(**axes: Sequence[object]) -> list[dict[str, Any]]:
    """Returns cases in which any two values of two axes occur together at least once; the first axes vary fastest.

    The choice is greedy: it always adds the combination with the most new pairs, until no pair is missing.
    """
    names = list(axes)
    combos = [dict(zip(names, values, strict=True)) for values in product(*axes.values())]
    pairs = [frozenset((a, str(case[a]), b, str(case[b])) for a, b in combinations(names, 2)) for case in combos]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(combos)), key=lambda i: len(pairs[i] & missing))
        chosen.append(combos[best])
        missing -= pairs[best]
    return chosen


def assert_close(actual: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Checks that two tensors differ by at most `roundings` roundings to the dtype; NaN equals NaN.

    Both are computed in float32 from the same numbers.
    """
    relative = roundings * _RELATIVE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=2e-5, equal_nan=True)
