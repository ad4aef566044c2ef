"""Cases of the other operations of a layer and of sampling."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.kernels.cases import (
    Case,
    Ceiling,
    ModelShape,
    Prepared,
    empty_kv,
    is_triton,
    kv_token_bytes,
    normal,
    num_buffers,
)
from kernels import Kernels

_MAX_POSITIONS = 16384
_EPS = 1e-5
_TEMPERATURE = 0.3
_MAX_READ_ROWS_CPU, _MAX_READ_ROWS_GPU = 8, 64
_MAX_GRAPH_ROWS = 256  # the executor's default of max_num_seqs


def rotate(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> Case:
    """Returns a case of rotate_and_store: views of one projection, and each token in a token slot of its own."""
    heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    row_bytes = model.head_dim * dtype.itemsize
    num_bytes = 2 * num_tokens * sum(heads) * row_bytes

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        num_blocks = -(-num_tokens // model.block_size) + 1
        angles = torch.rand(_MAX_POSITIONS, model.head_dim // 2, device=device)
        cos, sin = angles.cos(), angles.sin()
        positions = torch.randint(0, _MAX_POSITIONS, (num_tokens,), dtype=torch.int32, device=device)
        slots = torch.randperm((num_blocks - 1) * model.block_size, device=device)[:num_tokens] + model.block_size
        buffers = [
            (
                *torch.split(normal(device, dtype, num_tokens, sum(heads), model.head_dim), heads, dim=1),
                empty_kv(model, dtype, num_blocks, device),
            )
            for _ in range(num_buffers(num_bytes, device))
        ]

        def run() -> None:
            for query, key, value, kv in buffers:
                backend.rotate_and_store(query, key, value, cos, sin, positions, kv, slots)

        return Prepared(run, len(buffers))

    return Case("rotate_and_store", f"{model.name} T={num_tokens}", dtype, num_bytes, 0, "copy", prepare)


def norm(model: ModelShape, dtype: torch.dtype, num_tokens: int, adds: bool) -> Case:
    """Returns a case of rms_norm or add_rms_norm on hidden states."""
    tensor_bytes = num_tokens * model.hidden_size * dtype.itemsize
    num_bytes = (4 if adds else 2) * tensor_bytes

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        weight = normal(device, dtype, model.hidden_size)
        # The second of each pair is a residual. x is added to it a few hundred times, so it stays finite.
        buffers = [
            tuple(normal(device, dtype, num_tokens, model.hidden_size) for _ in range(2))
            for _ in range(num_buffers(num_bytes, device))
        ]

        def run() -> None:
            for x, residual in buffers:
                if adds:
                    backend.add_rms_norm(x, residual, weight, _EPS)
                else:
                    backend.rms_norm(residual, weight, _EPS)

        return Prepared(run, len(buffers))

    operation = "add_rms_norm" if adds else "rms_norm"
    return Case(operation, f"{model.name} T={num_tokens}", dtype, num_bytes, 0, "copy", prepare)


def silu(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> Case:
    """Returns the case of the activation: silu(gate) times the up projection."""
    num_bytes = 3 * num_tokens * model.intermediate_size * dtype.itemsize

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        buffers = [
            normal(device, dtype, num_tokens, 2 * model.intermediate_size)
            for _ in range(num_buffers(num_bytes, device))
        ]

        def run() -> None:
            for gate_up in buffers:
                backend.silu_multiply(gate_up)

        return Prepared(run, len(buffers))

    return Case("silu_multiply", f"{model.name} T={num_tokens}", dtype, num_bytes, 0, "copy", prepare)


def linear(model: ModelShape, dtype: torch.dtype, num_tokens: int) -> Case:
    """Returns a case of the gate and up projections, stacked. Reading bounds one row, FLOPs bound many rows."""
    sizes = projections(model)["gate_up"]
    return _product(f"{model.name} T={num_tokens}", dtype, num_tokens, sizes, is_read=num_tokens <= _MAX_READ_ROWS_CPU)


def projection(model: ModelShape, dtype: torch.dtype, name: str, num_tokens: int) -> Case:
    """Returns a case of one of `projections` on a GPU.

    A GPU computes 200 to 300 FLOPs in the time in which it reads a byte, and a row of a 16-bit product is one FLOP for
    each byte of the weights. So reading bounds up to 64 rows. Up to 256 rows are decoded in a graph, more are prompts.
    """
    label = f"{model.name} {name} M={num_tokens}"
    sizes, is_read = projections(model)[name], num_tokens <= _MAX_READ_ROWS_GPU
    return _product(label, dtype, num_tokens, sizes, is_read=is_read, in_graph=num_tokens <= _MAX_GRAPH_ROWS)


def projections(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns (input size, output size) of the model's products, stacked as they are served."""
    attended = model.num_heads * model.head_dim
    return {
        "qkv": (model.hidden_size, attended + 2 * model.num_kv_heads * model.head_dim),
        "o": (attended, model.hidden_size),
        "gate_up": (model.hidden_size, 2 * model.intermediate_size),
        "down": (model.intermediate_size, model.hidden_size),
        "head": (model.hidden_size, model.vocab_size),
    }


def _product(
    label: str, dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int], *, is_read: bool, in_graph: bool = True
) -> Case:
    in_size, out_size = sizes
    num_bytes = (in_size * out_size + num_tokens * (in_size + out_size)) * dtype.itemsize
    num_flops = 0 if is_read else 2 * num_tokens * in_size * out_size

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        num_calls = num_buffers(num_bytes, device)
        weights = [backend.pack_linear([normal(device, dtype, out_size, in_size)]) for _ in range(num_calls)]
        x = normal(device, dtype, num_tokens, in_size)

        def run() -> None:
            for weight in weights:
                weight(x)

        return Prepared(run, num_calls)

    ceiling: Ceiling = "read" if is_read else "gemm"
    return Case("linear", label, dtype, num_bytes, num_flops, ceiling, prepare, in_graph)


def copy(model: ModelShape, dtype: torch.dtype, num_copies: int) -> Case:
    """Returns a case that copies `num_copies` blocks in all layers, as copy-on-write does."""
    num_bytes = 2 * num_copies * model.block_size * model.num_layers * kv_token_bytes(model, dtype)

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        num_calls = num_buffers(num_bytes, device)
        num_blocks = 2 * num_copies * num_calls + 1
        tile = (2, model.num_kv_heads, model.block_size, model.head_dim)
        pool = torch.empty((model.num_layers, num_blocks, *tile), dtype=dtype, device=device).normal_()
        places = (torch.randperm(num_blocks - 1, device=device) + 1).view(num_calls, 2, num_copies)

        def run() -> None:
            for sources, destinations in places:
                backend.copy_blocks(pool, sources, destinations)

        return Prepared(run, num_calls)

    return Case("copy_blocks", f"{model.name} N={num_copies}", dtype, num_bytes, 0, "copy", prepare)


def greedy(model: ModelShape, dtype: torch.dtype, num_rows: int) -> Case:
    """Returns a case of greedy choice, which only the Triton kernels have as an operation."""
    num_bytes = num_rows * model.vocab_size * dtype.itemsize

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        triton: Any = backend
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        buffers = [normal(device, dtype, num_rows, model.vocab_size) for _ in range(num_buffers(num_bytes, device))]

        def run() -> None:
            for logits in buffers:
                triton.choose_greedily(logits, token_ids)

        return Prepared(run, len(buffers))

    return Case("choose_greedily", f"{model.name} S={num_rows}", dtype, num_bytes, 0, "read", prepare)


def sampling(model: ModelShape, dtype: torch.dtype, num_rows: int, top_p: float) -> Case:
    """Returns a case of sampling, which the reference lacks.

    Logits at temperature 0.3 spread about as much as a language model's.
    """
    num_bytes, cut = num_rows * model.vocab_size * dtype.itemsize, f" top-p {top_p}" if top_p < 1 else ""

    def prepare(backend: Kernels, device: torch.device) -> Prepared:
        buffers = [normal(device, dtype, num_rows, model.vocab_size) for _ in range(num_buffers(num_bytes, device))]
        draw = (_draw_on_device if is_triton(backend) else _draw_on_host)(backend, num_rows, top_p, device)

        def run() -> None:
            for logits in buffers:
                draw(logits)

        return Prepared(run, len(buffers))

    return Case("sample", f"{model.name} S={num_rows}{cut}", dtype, num_bytes, 0, "read", prepare)


def _draw_on_host(backend: Any, num_rows: int, top_p: float, device: torch.device) -> Callable[[torch.Tensor], Any]:
    temperatures, top_ps = np.full(num_rows, _TEMPERATURE, np.float32), np.full(num_rows, top_p, np.float32)
    top_ks, min_ps = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
    rows, uniforms = np.arange(num_rows), np.random.default_rng(5).random(num_rows, np.float32)
    return lambda logits: backend.sample(logits, rows, temperatures, top_ks, top_ps, min_ps, uniforms)


def _draw_on_device(backend: Any, num_rows: int, top_p: float, device: torch.device) -> Callable[[torch.Tensor], Any]:
    states = torch.zeros((num_rows, backend.STATE_FIELDS), dtype=torch.float32, device=device)
    states[:, backend.StateField.TEMPERATURE], states[:, backend.StateField.TOP_P] = _TEMPERATURE, top_p
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    uniforms, token_ids = torch.rand(num_rows, device=device), torch.empty_like(slots)

    def draw(logits: torch.Tensor) -> None:
        backend.choose_greedily(logits, token_ids)
        backend.draw_tokens(logits, states.view(torch.int32), slots, uniforms, token_ids)

    return draw
