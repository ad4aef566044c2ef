"""Compiles every kernel that a model launches, by launching it once on tiny inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.triton.decode import attend_decode
from kernels.triton.decode_work import DecodePlanner
from kernels.triton.elementwise import add_rms_norm, rms_norm, silu_multiply
from kernels.triton.greedy import choose_greedily
from kernels.triton.kv import copy_blocks, rotate_and_store
from kernels.triton.prefill import attend_prefill, plan_prefill
from kernels.triton.rows import STATE_FIELDS, close_rows, open_rows
from kernels.triton.sampling import draw_tokens
from kernels.triton.tables import update_tables
from kernels.triton.tuning import decode_tuning

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.interface import AttentionShape, Progress

_TOKENS = 2


def warm_up(
    shape: AttentionShape,
    progress: Progress | None = None,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    max_num_seqs: int = 256,
    device: torch.device | None = None,
) -> None:
    """See `kernels.Kernels.warm_up`. Triton caches compiled kernels on disk, so later starts only load them.

    Without hidden_size the norms of hidden states are left out, without vocab_size sampling. max_num_seqs is the value
    that planners are made with. device: by default the current GPU, or the CPU (in the interpreter) if there is none.
    """
    device = device or _current_device()
    model = _Model(shape, device, max_num_seqs)
    variants: list[tuple[str, Callable[[], None]]] = [
        ("rotate and store", model.rotate),
        ("decode attention", model.decode),
        ("prefill attention", lambda: model.prefill(window=0)),
        ("prefill attention with a window", lambda: model.prefill(window=1)),
        ("copy blocks", model.copy),
        ("block tables", model.update),
        ("rows of a step", model.rows),
        ("activation", model.activate),
        ("norms of heads", model.norm_heads),
    ]
    if hidden_size is not None:
        variants.append(("norms", lambda: model.norm(hidden_size)))
    if vocab_size is not None:
        variants.append(("greedy sampling", lambda: model.choose(vocab_size)))
        variants.append(("sampling", lambda: model.draw(vocab_size)))
    for done, (name, launch) in enumerate(variants):
        if progress is not None:
            progress(name, done, len(variants))
        launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _current_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _Model:
    """Inputs for every kernel: two sequences of one token each, in separate blocks."""

    def __init__(self, shape: AttentionShape, device: torch.device, max_num_seqs: int) -> None:
        self._shape, self._device, self._max_num_seqs = shape, device, max_num_seqs
        self._heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        blocks = (_TOKENS + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self._pool = torch.zeros((1, *blocks), dtype=shape.dtype, device=device)
        self._table = self._integers([[1], [2]])
        self._rows = self._integers([0, 1])
        self._positions = self._integers([0, 0])

    def _integers(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _zeros(self, *sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=self._shape.dtype, device=self._device)

    def _projection(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns query, key and value as views of a fused projection."""
        fused = self._zeros(_TOKENS, sum(self._heads), self._shape.head_dim)
        query, key, value = torch.split(fused, self._heads, dim=1)
        return query, key, value

    def rotate(self) -> None:
        table = torch.zeros((1, self._shape.head_dim // 2), dtype=torch.float32, device=self._device)
        token_slots = torch.zeros(_TOKENS, dtype=torch.int64, device=self._device)
        rotate_and_store(*self._projection(), table, table, self._positions, self._pool[0], token_slots)

    def decode(self) -> None:
        """Launches decode attention with block tables by row and by table_rows, for contexts of up to two chunks."""
        query, _, _ = self._projection()
        out = torch.empty_like(query)
        two_chunks = 2 * decode_tuning(self._shape, self._device).chunk_tokens
        planner = DecodePlanner(self._shape, self._device, self._max_num_seqs, two_chunks)
        for table_rows in (None, self._rows):
            work = planner.plan(self._table, self._integers([1, 1]), table_rows)
            attend_decode(query, self._pool[0], work, out, 1.0)

    def prefill(self, window: int) -> None:
        query, _, _ = self._projection()
        starts, lengths = np.arange(_TOKENS + 1, dtype=np.int32), np.ones(_TOKENS, dtype=np.int32)
        work = plan_prefill(self._shape, self._table, starts, lengths)
        attend_prefill(query, self._pool[0], work, torch.empty_like(query), 1.0, window)

    def copy(self) -> None:
        blocks = torch.tensor([1, 2], device=self._device)
        copy_blocks(self._pool, blocks[:1], blocks[1:])

    def update(self) -> None:
        update_tables(self._table, self._integers([[0, 0, 1]]))

    def rows(self) -> None:
        """Opens rows with and without known tokens, and closes them; both slots have ended."""
        states = torch.ones((_TOKENS, STATE_FIELDS), dtype=torch.int32, device=self._device)
        token_slots = torch.empty(_TOKENS, dtype=torch.int64, device=self._device)
        for known in (None, self._integers([[0, 0], [0, 0]])):
            tokens, positions, lengths = (torch.empty_like(self._rows) for _ in range(3))
            open_rows(
                states,
                self._table,
                self._rows,
                tokens,
                positions,
                lengths,
                token_slots,
                self._shape.block_size,
                known,
            )
        end_kinds = torch.zeros((_TOKENS, 1), dtype=torch.uint8, device=self._device)
        peaks = torch.zeros(_TOKENS, device=self._device)
        close_rows(states, end_kinds, self._rows, self._rows, peaks, torch.empty_like(states), 1, 1)

    def activate(self) -> None:
        silu_multiply(self._zeros(_TOKENS, 64))

    def norm_heads(self) -> None:
        query, key, _ = self._projection()
        for heads in (query, key):
            rms_norm(heads, self._zeros(self._shape.head_dim), 1.0)

    def norm(self, hidden_size: int) -> None:
        x, weight = self._zeros(_TOKENS, hidden_size), self._zeros(hidden_size)
        rms_norm(x, weight, 1.0)
        add_rms_norm(x, torch.zeros_like(x), weight, 1.0)

    def choose(self, vocab_size: int) -> None:
        for dtype in (self._shape.dtype, torch.float32):
            logits = torch.zeros((_TOKENS, vocab_size), dtype=dtype, device=self._device)
            for token_dtype in (torch.int32, torch.int64):
                choose_greedily(logits, torch.empty(_TOKENS, dtype=token_dtype, device=self._device))

    def draw(self, vocab_size: int) -> None:
        states = torch.zeros((_TOKENS, STATE_FIELDS), dtype=torch.int32, device=self._device)
        uniforms = torch.zeros(_TOKENS, dtype=torch.float32, device=self._device)
        for dtype in dict.fromkeys((self._shape.dtype, torch.float32)):
            logits = torch.zeros((_TOKENS, vocab_size), dtype=dtype, device=self._device)
            draw_tokens(logits, states, self._rows, uniforms, torch.zeros_like(self._rows))
