"""Cases of paged attention: decode and prefill."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.kernels.cases import Case, ModelShape, Prepared, empty_kv, is_triton, kv_token_bytes, normal, num_buffers
from kernels import Kernels


def decode(model: ModelShape, dtype: torch.dtype, contexts: Sequence[int], label: str, in_graph: bool = True) -> Case:
    """Returns a case with one query per sequence. On a GPU a round is a step: the plan, then all layers."""
    rows = len(contexts)
    query_bytes = rows * model.num_heads * model.head_dim * dtype.itemsize
    num_bytes = sum(contexts) * kv_token_bytes(model, dtype) + 2 * query_bytes

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        paged = _paged(model, dtype, contexts, device, num_buffers(num_bytes, device))
        query = normal(device, dtype, rows, model.num_heads, model.head_dim)
        out, scale = torch.empty_like(query), model.head_dim**-0.5
        if is_triton(backend):
            triton: Any = backend
            planner = triton.DecodePlanner(model.attention(dtype), device, rows, max(contexts))

            def step() -> None:
                work = planner.plan(paged.tables, paged.context_lens)
                for kv in paged.layers:
                    triton.attend_decode(query, kv, work, out, scale)

            return Prepared(step, len(paged.layers))

        def layers() -> None:
            for kv in paged.layers:
                backend.attention_decode(query, kv, paged.tables, paged.context_lens, out, scale)

        return Prepared(layers, len(paged.layers))

    return Case("attention_decode", label, dtype, num_bytes, 0, "read", prepare, in_graph)


def prefill(model: ModelShape, dtype: torch.dtype, num_queries: int, context: int, label: str) -> Case:
    """Returns the case of a prompt of num_queries tokens after a cached prefix; not in a graph, as in serving."""
    seen = num_queries * context - num_queries * (num_queries - 1) // 2
    num_flops = 4 * model.num_heads * model.head_dim * seen
    num_bytes = (
        context * kv_token_bytes(model, dtype) + 2 * num_queries * model.num_heads * model.head_dim * dtype.itemsize
    )

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        paged = _paged(model, dtype, [context], device, min(4, num_buffers(num_bytes, device)))
        query = normal(device, dtype, num_queries, model.num_heads, model.head_dim)
        out, scale = torch.empty_like(query), model.head_dim**-0.5
        starts = np.array([0, num_queries], dtype=np.int32)
        if is_triton(backend):
            triton: Any = backend
            lengths = np.array([context], dtype=np.int32)
            work = triton.plan_prefill(model.attention(dtype), paged.tables, starts, lengths)

            def step() -> None:
                for kv in paged.layers:
                    triton.attend_prefill(query, kv, work, out, scale)

            return Prepared(step, len(paged.layers))
        query_starts = torch.from_numpy(starts).to(device)

        def layers() -> None:
            for kv in paged.layers:
                backend.attention_prefill(query, kv, paged.tables, query_starts, paged.context_lens, out, scale)

        return Prepared(layers, len(paged.layers))

    return Case("attention_prefill", label, dtype, num_bytes, num_flops, "gemm", prepare, in_graph=False)


def mixed_contexts(num_rows: int, shortest: int, longest: int) -> list[int]:
    """Returns shuffled lengths that are evenly spaced on a log scale; they are always the same."""
    lengths: list[int] = np.geomspace(shortest, longest, num_rows).astype(int).tolist()
    random.Random(5).shuffle(lengths)
    return lengths


@dataclass(frozen=True, slots=True)
class _Paged:
    """Sequences with blocks at random places of a pool. All layers share the tables."""

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
    layers = tuple(empty_kv(model, dtype, sum(sizes) + 1, device).normal_() for _ in range(num_layers))
    return _Paged(layers, tables.to(device), torch.tensor(contexts, dtype=torch.int32, device=device))
