"""A case of the kernel benchmark: an operation, a shape, and the minimum that one call must move or compute.

A case allocates when it is prepared, so that only one case holds memory at a time. Numbers are random, blocks lie at
random places of the pool, and each call of a round has buffers of its own (see `bench.stopwatch`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal

import torch

from bench.machine import cache_bytes
from bench.stopwatch import Round
from kernels import AttentionShape, Kernels

Ceiling = Literal["read", "copy", "gemm"]

BLOCK_SIZE = 16
_CACHES_TO_FILL = 3
_MAX_BUFFERS = 1024


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model. Counts are those of one layer, except num_layers."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    block_size: int = BLOCK_SIZE

    def attention(self, dtype: torch.dtype) -> AttentionShape:
        return AttentionShape(dtype, self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)


# Llama 3.1 8B, the same with other head sizes, and the 28-million-parameter model of the serving benchmarks.
LARGE = ModelShape("8B", 32, 8, 128, 4096, 14336, 128256, 32)
LARGE_D64 = replace(LARGE, name="8B D64", head_dim=64)
LARGE_D256 = replace(LARGE, name="8B D256", head_dim=256)
SMALL = ModelShape("28M", 8, 4, 64, 512, 1408, 8000, 8)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A round, and the number of calls in it. `run` keeps the buffers alive."""

    run: Round
    num_calls: int


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape.

    num_bytes  least number of bytes that one call reads and writes
    num_flops  FLOPs of one call if arithmetic bounds it; else 0
    ceiling    the ceiling that its rate is compared with
    in_graph   measured in a CUDA graph on a GPU, as decodes are served
    """

    operation: str
    label: str
    dtype: torch.dtype
    num_bytes: int
    num_flops: int
    ceiling: Ceiling
    prepare: Callable[[Kernels, torch.device], Prepared]
    in_graph: bool = True

    @property
    def name(self) -> str:
        return f"{self.operation} {self.label}"

    def buffer_bytes(self, device: torch.device) -> int:
        """Returns about how many bytes `prepare` allocates: what all calls of a round read and write."""
        return self.num_bytes * num_buffers(self.num_bytes, device)


def is_triton(backend: Kernels) -> bool:
    """Returns True for Triton's kernels, whose layers share a plan that is made once a step."""
    return isinstance(backend, ModuleType) and backend.__name__ == "kernels.triton"


def empty_kv(model: ModelShape, dtype: torch.dtype, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Returns the KV pool of one layer, not initialised."""
    tile = (2, model.num_kv_heads, model.block_size, model.head_dim)
    return torch.empty((num_blocks, *tile), dtype=dtype, device=device)


def normal(device: torch.device, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Returns standard normal numbers."""
    return torch.empty(sizes, dtype=dtype, device=device).normal_()


def kv_token_bytes(model: ModelShape, dtype: torch.dtype) -> int:
    """Returns the bytes of keys and values of one token in one layer."""
    return 2 * model.num_kv_heads * model.head_dim * dtype.itemsize


def num_buffers(num_bytes: int, device: torch.device) -> int:
    """Returns how many buffers together exceed the cache, at most _MAX_BUFFERS."""
    return max(1, min(_MAX_BUFFERS, -(-_CACHES_TO_FILL * cache_bytes(device) // num_bytes)))
