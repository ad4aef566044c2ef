"""Attention over KV blocks: the Python interface of `kernels.cpu.attend`."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from kernels.cpu.attend import ATTENTION_JOB, attend_kernel, part_numbers
from kernels.cpu.native import FLOAT32, storage_of, strided
from kernels.cpu.panels import row_format
from kernels.cpu.softmax import CHUNK
from kernels.cpu.team import Job
from kernels.cpu.tiles import HELD_ROWS, TILE_ROWS, few_rows, panel_words, tiles_kernel
from kernels.cpu.tokens import padded_size, tokens_ahead

_LOG2_E = math.log2(math.e)
_job = Job(ATTENTION_JOB)


class _Workspace(threading.local):
    """Memory for single queries whose context spans several chunks; each calling thread keeps one, which only grows."""

    def __init__(self) -> None:
        self._parts, self._arrivals = np.empty(0, np.float32), np.zeros(0, np.int64)
        self.parts_address = self.arrivals_address = 0

    def reserve(self, num_parts: int, num_arrivals: int) -> None:
        """Makes room for this many numbers. All arrivals are zero, because every call leaves them zero."""
        if self._parts.size < num_parts:
            self._parts = np.empty(num_parts, np.float32)
            self.parts_address = self._parts.ctypes.data
        if self._arrivals.size < num_arrivals:
            self._arrivals = np.zeros(num_arrivals, np.int64)
            self.arrivals_address = self._arrivals.ctypes.data


_workspace = _Workspace()


def _run(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor | None,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    dtype, int32 = query.dtype, torch.int32
    if kv.dtype is not dtype or out.dtype is not dtype:
        raise TypeError("query, kv and out must have one dtype")
    if block_tables.dtype is not int32 or context_lens.dtype is not int32:
        raise TypeError("block_tables and context_lens must be int32")
    if query_starts is not None and (query_starts.dtype is not int32 or not query_starts.is_contiguous()):
        raise TypeError("query_starts must be int32 and contiguous")
    if query.stride(2) != 1 or out.stride(2) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the last dimension of query, out and block_tables must be contiguous")
    if not (kv.is_contiguous() and context_lens.is_contiguous()):
        raise ValueError("kv and context_lens must be contiguous")

    num_sequences, num_columns = block_tables.shape
    num_kv_heads, block_size = kv.shape[2:4]
    max_chunks = -(-num_columns * block_size // CHUNK)
    if max_chunks > 1:
        num_arrivals = num_sequences * num_kv_heads
        num_numbers = part_numbers(query.shape[1] // num_kv_heads, query.shape[2])
        _workspace.reserve(num_arrivals * max_chunks * num_numbers, num_arrivals)
    job = _job.fill(
        block_tables=block_tables.data_ptr(),
        table_width=block_tables.stride(0),
        table_rows=0,
        context_lens=context_lens.data_ptr(),
        query_starts=0 if query_starts is None else query_starts.data_ptr(),
        num_sequences=num_sequences,
        parts=_workspace.parts_address,
        arrivals=_workspace.arrivals_address,
        max_chunks=max_chunks,
        **attention_fields(query, kv, out, scale, window),
    )
    attend_kernel().run_in_team(job)


def attention_fields(
    query: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, scale: float, window: int
) -> dict[str, float]:
    """Returns the fields of an ATTENTION_JOB, except those that describe the sequences and the workspace."""
    _, num_kv_heads, block_size, head_dim = kv.shape[1:]
    storage = storage_of(query.dtype)
    pack, score, weigh = tiles_kernel(head_dim, storage)
    row_kind = row_format(storage, storage, head_dim)
    return {
        "pack": pack,
        "score": score,
        "weigh": weigh,
        "takes_pairs": row_kind != FLOAT32,
        "tile_rows": TILE_ROWS[row_kind],
        "held_rows": HELD_ROWS[row_kind],
        "few_rows": few_rows(head_dim, storage),
        "panel_words": panel_words(row_kind),
        "padded_size": padded_size(head_dim),
        "tokens_ahead": tokens_ahead(head_dim, storage),
        **strided("query", query),
        **strided("out", out),
        "kv": kv.data_ptr(),
        "kv_block_bytes": kv.stride(0) * kv.element_size(),
        "storage": storage,
        "number_bytes": kv.element_size(),
        "num_kv_heads": num_kv_heads,
        "group": query.shape[1] // num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "window": window,
        "scale": scale * _LOG2_E,
    }


def attention_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """See `kernels.Kernels.attention_decode`."""
    _run(query, kv, block_tables, None, context_lens, out, scale, window)


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
    """See `kernels.Kernels.attention_prefill`."""
    _run(query, kv, block_tables, query_starts, context_lens, out, scale, window)
