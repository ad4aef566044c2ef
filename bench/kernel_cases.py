"""What is measured of the kernels: operations, shapes, and what each has to move or to compute at least.

A case allocates when it is prepared, so that only one of them holds memory at a time. Numbers are random, blocks lie
at random places of the pool, and each call of a round has buffers of its own (see `bench.stopwatch`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from bench.machine import cache_bytes
from bench.stopwatch import Round
from kernels import AttentionShape, Kernels

Ceiling = Literal["read", "copy", "gemm"]

BLOCK_SIZE = 16
_CACHES_TO_FILL = 3
_MAX_BUFFERS = 1024
_MAX_POSITIONS = 16384
_EPS = 1e-5
_TEMPERATURE = 0.3


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an operation needs to know of a model. Counts are those of one layer, but for num_layers."""

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


# Llama 3.1 8B; the same with other heads; and the 28-million-parameter model of the serving benchmarks.
LARGE = ModelShape("8B", 32, 8, 128, 4096, 14336, 128256, 32)
LARGE_D64 = replace(LARGE, name="8B D64", head_dim=64)
LARGE_D256 = replace(LARGE, name="8B D256", head_dim=256)
SMALL = ModelShape("28M", 8, 4, 64, 512, 1408, 8000, 8)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A round, and how often it does the case's work. `run` keeps the buffers alive."""

    run: Round
    num_calls: int


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape.

    num_bytes  that one call has to move at least, read and written
    num_flops  of one call, where arithmetic is what bounds it; else 0
    ceiling    what its rate is a share of
    in_graph   measured in a CUDA graph, where there is one, as decodes are served
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


def decode(model: ModelShape, dtype: torch.dtype, contexts: Sequence[int], label: str, in_graph: bool = True) -> Case:
    """One query a sequence. On a GPU a round is a step: the plan, then layer after layer."""
    rows = len(contexts)
    query_bytes = rows * model.num_heads * model.head_dim * dtype.itemsize
    num_bytes = sum(contexts) * _kv_token_bytes(model, dtype) + 2 * query_bytes

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        paged = _paged(model, dtype, contexts, device, _num_buffers(num_bytes, device))
        query = _normal(device, dtype, rows, model.num_heads, model.head_dim)
        out, scale = torch.empty_like(query), model.head_dim**-0.5
        if is_triton(home):
            triton: Any = home
            planner = triton.DecodePlanner(model.attention(dtype), device, rows, max(contexts))

            def step() -> None:
                work = planner.plan(paged.tables, paged.context_lens)
                for kv in paged.layers:
                    triton.attend_decode(query, kv, work, out, scale)

            return Prepared(step, len(paged.layers))

        def layers() -> None:
            for kv in paged.layers:
                home.attention_decode(query, kv, paged.tables, paged.context_lens, out, scale)

        return Prepared(layers, len(paged.layers))

    return Case("attention_decode", label, dtype, num_bytes, 0, "read", prepare, in_graph)


def prefill(model: ModelShape, dtype: torch.dtype, num_queries: int, context: int, label: str) -> Case:
    """The last num_queries tokens of one sequence; the others are a cached prefix. Eager, as served."""
    seen = num_queries * context - num_queries * (num_queries - 1) // 2
    num_flops = 4 * model.num_heads * model.head_dim * seen
    num_bytes = (
        context * _kv_token_bytes(model, dtype) + 2 * num_queries * model.num_heads * model.head_dim * dtype.itemsize
    )

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        paged = _paged(model, dtype, [context], device, min(4, _num_buffers(num_bytes, device)))
        query = _normal(device, dtype, num_queries, model.num_heads, model.head_dim)
        out, scale = torch.empty_like(query), model.head_dim**-0.5
        starts = np.array([0, num_queries], dtype=np.int32)
        if is_triton(home):
            triton: Any = home
            lengths = np.array([context], dtype=np.int32)
            work = triton.plan_prefill(model.attention(dtype), paged.tables, starts, lengths)

            def step() -> None:
                for kv in paged.layers:
                    triton.attend_prefill(query, kv, work, out, scale)

            return Prepared(step, len(paged.layers))
        query_starts = torch.from_numpy(starts).to(device)

        def layers() -> None:
            for kv in paged.layers:
                home.attention_prefill(query, kv, paged.tables, query_starts, paged.context_lens, out, scale)

        return Prepared(layers, len(paged.layers))

    return Case("attention_prefill", label, dtype, num_bytes, num_flops, "gemm", prepare, in_graph=False)


def rotate(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> Case:
    """Query, key and value as views of one projection; each token to a slot of its own."""
    heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    row_bytes = model.head_dim * dtype.itemsize
    num_bytes = 2 * num_tokens * sum(heads) * row_bytes

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        num_blocks = -(-num_tokens // model.block_size) + 1
        angles = torch.rand(_MAX_POSITIONS, model.head_dim // 2, device=device)
        cos, sin = angles.cos(), angles.sin()
        positions = torch.randint(0, _MAX_POSITIONS, (num_tokens,), dtype=torch.int32, device=device)
        slots = torch.randperm((num_blocks - 1) * model.block_size, device=device)[:num_tokens] + model.block_size
        buffers = [
            (
                *torch.split(_normal(device, dtype, num_tokens, sum(heads), model.head_dim), heads, dim=1),
                _empty_kv(model, dtype, num_blocks, device),
            )
            for _ in range(_num_buffers(num_bytes, device))
        ]

        def run() -> None:
            for query, key, value, kv in buffers:
                home.rotate_and_store(query, key, value, cos, sin, positions, kv, slots)

        return Prepared(run, len(buffers))

    return Case("rotate_and_store", f"{model.name} T={num_tokens}", dtype, num_bytes, 0, "copy", prepare)


def norm(model: ModelShape, dtype: torch.dtype, num_tokens: int, adds: bool) -> Case:
    """rms_norm, or add_rms_norm, of hidden states."""
    tensor_bytes = num_tokens * model.hidden_size * dtype.itemsize
    num_bytes = (4 if adds else 2) * tensor_bytes

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        weight = _normal(device, dtype, model.hidden_size)
        # The second of each pair is a residual, to which x is added a few hundred times: it stays finite.
        buffers = [
            tuple(_normal(device, dtype, num_tokens, model.hidden_size) for _ in range(2))
            for _ in range(_num_buffers(num_bytes, device))
        ]

        def run() -> None:
            for x, residual in buffers:
                if adds:
                    home.add_rms_norm(x, residual, weight, _EPS)
                else:
                    home.rms_norm(residual, weight, _EPS)

        return Prepared(run, len(buffers))

    operation = "add_rms_norm" if adds else "rms_norm"
    return Case(operation, f"{model.name} T={num_tokens}", dtype, num_bytes, 0, "copy", prepare)


def silu(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> Case:
    num_bytes = 3 * num_tokens * model.intermediate_size * dtype.itemsize

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        buffers = [
            _normal(device, dtype, num_tokens, 2 * model.intermediate_size)
            for _ in range(_num_buffers(num_bytes, device))
        ]

        def run() -> None:
            for gate_up in buffers:
                home.silu_multiply(gate_up)

        return Prepared(run, len(buffers))

    return Case("silu_multiply", f"{model.name} T={num_tokens}", dtype, num_bytes, 0, "copy", prepare)


def linear(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> Case:
    """The stacked gate and up projections: the largest weight of a layer. One row reads it, many rows compute."""
    in_size, out_size = model.hidden_size, 2 * model.intermediate_size
    num_bytes = (in_size * out_size + num_tokens * (in_size + out_size)) * dtype.itemsize
    num_flops = 2 * num_tokens * in_size * out_size if num_tokens > 8 else 0

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        num_calls = _num_buffers(num_bytes, device)
        weights = [home.pack_linear([_normal(device, dtype, out_size, in_size)]) for _ in range(num_calls)]
        x = _normal(device, dtype, num_tokens, in_size)

        def run() -> None:
            for weight in weights:
                weight(x)

        return Prepared(run, num_calls)

    ceiling: Ceiling = "gemm" if num_flops else "read"
    return Case("linear", f"{model.name} T={num_tokens}", dtype, num_bytes, num_flops, ceiling, prepare)


def copy(model: ModelShape, dtype: torch.dtype, num_copies: int) -> Case:
    """Copy-on-write of so many blocks, all layers of them."""
    num_bytes = 2 * num_copies * model.block_size * model.num_layers * _kv_token_bytes(model, dtype)

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        num_calls = _num_buffers(num_bytes, device)
        num_blocks = 2 * num_copies * num_calls + 1
        tile = (2, model.num_kv_heads, model.block_size, model.head_dim)
        pool = torch.empty((model.num_layers, num_blocks, *tile), dtype=dtype, device=device).normal_()
        places = (torch.randperm(num_blocks - 1, device=device) + 1).view(num_calls, 2, num_copies)

        def run() -> None:
            for sources, destinations in places:
                home.copy_blocks(pool, sources, destinations)

        return Prepared(run, num_calls)

    return Case("copy_blocks", f"{model.name} N={num_copies}", dtype, num_bytes, 0, "copy", prepare)


def greedy(model: ModelShape, dtype: torch.dtype, num_rows: int) -> Case:
    """Of the Triton home only."""
    num_bytes = num_rows * model.vocab_size * dtype.itemsize

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        triton: Any = home
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        buffers = [_normal(device, dtype, num_rows, model.vocab_size) for _ in range(_num_buffers(num_bytes, device))]

        def run() -> None:
            for logits in buffers:
                triton.choose_greedily(logits, token_ids)

        return Prepared(run, len(buffers))

    return Case("choose_greedily", f"{model.name} S={num_rows}", dtype, num_bytes, 0, "read", prepare)


def sampling(model: ModelShape, dtype: torch.dtype, num_rows: int, top_p: float) -> Case:
    """Not of the reference. Logits spread as 3.3 standard normal ones, about as much as a language model's."""
    num_bytes, cut = num_rows * model.vocab_size * dtype.itemsize, f" top-p {top_p}" if top_p < 1 else ""

    def prepare(home: Kernels, device: torch.device) -> Prepared:
        buffers = [_normal(device, dtype, num_rows, model.vocab_size) for _ in range(_num_buffers(num_bytes, device))]
        draw = (_draw_on_device if is_triton(home) else _draw_on_host)(home, num_rows, top_p, device)

        def run() -> None:
            for logits in buffers:
                draw(logits)

        return Prepared(run, len(buffers))

    return Case("sample", f"{model.name} S={num_rows}{cut}", dtype, num_bytes, 0, "read", prepare)


def _draw_on_host(home: Any, num_rows: int, top_p: float, device: torch.device) -> Callable[[torch.Tensor], Any]:
    temperatures, top_ps = np.full(num_rows, _TEMPERATURE, np.float32), np.full(num_rows, top_p, np.float32)
    top_ks, min_ps = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
    rows, uniforms = np.arange(num_rows), np.random.default_rng(5).random(num_rows, np.float32)
    return lambda logits: home.sample(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms)


def _draw_on_device(home: Any, num_rows: int, top_p: float, device: torch.device) -> Callable[[torch.Tensor], Any]:
    states = torch.zeros((num_rows, home.STATE_FIELDS), dtype=torch.float32, device=device)
    states[:, home.StateField.TEMPERATURE], states[:, home.StateField.TOP_P] = _TEMPERATURE, top_p
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    uniforms, token_ids = torch.rand(num_rows, device=device), torch.empty_like(slots)

    def draw(logits: torch.Tensor) -> None:
        home.choose_greedily(logits, token_ids)
        home.draw_tokens(logits, states.view(torch.int32), slots, uniforms, token_ids)

    return draw


def mixed_contexts(num_rows: int, shortest: int, longest: int) -> list[int]:
    """Lengths spread evenly over the logarithm, in no order; always the same."""
    lengths: list[int] = np.geomspace(shortest, longest, num_rows).astype(int).tolist()
    random.Random(5).shuffle(lengths)
    return lengths


def is_triton(home: Kernels) -> bool:
    """Triton's home has more than `Kernels`: what the layers of a step share is planned once."""
    return isinstance(home, ModuleType) and home.__name__ == "kernels.triton"


@dataclass(frozen=True, slots=True)
class _Paged:
    """Sequences at random places of a pool; all layers share the tables."""

    layers: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    context_lens: torch.Tensor


def _paged(
    model: ModelShape, dtype: torch.dtype, contexts: Sequence[int], device: torch.device, num_layers: int
) -> _Paged:
    sizes = [-(-context // model.block_size) for context in contexts]
    blocks = torch.randperm(sum(sizes)) + 1
    tables = torch.zeros((len(contexts), max(sizes)), dtype=torch.int32)
    for row, own in enumerate(torch.split(blocks, sizes)):
        tables[row, : len(own)] = own
    layers = tuple(_empty_kv(model, dtype, sum(sizes) + 1, device).normal_() for _ in range(num_layers))
    return _Paged(layers, tables.to(device), torch.tensor(contexts, dtype=torch.int32, device=device))


def _empty_kv(model: ModelShape, dtype: torch.dtype, num_blocks: int, device: torch.device) -> torch.Tensor:
    tile = (2, model.num_kv_heads, model.block_size, model.head_dim)
    return torch.empty((num_blocks, *tile), dtype=dtype, device=device)


def _normal(device: torch.device, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=device).normal_()


def _kv_token_bytes(model: ModelShape, dtype: torch.dtype) -> int:
    """Of one layer."""
    return 2 * model.num_kv_heads * model.head_dim * dtype.itemsize


def _num_buffers(num_bytes: int, device: torch.device) -> int:
    """So many that they are larger than the cache together, where that takes no more than _MAX_BUFFERS."""
    return max(1, min(_MAX_BUFFERS, -(-_CACHES_TO_FILL * cache_bytes(device) // num_bytes)))
