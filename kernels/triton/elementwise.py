"""Norms and the gated activation, each in one pass over memory."""

import torch
import triton.language as tl

from kernels.triton.jit import kernel, padded

_NORM_TILE = 2048  # numbers that one program processes if rows are short
_SILU_TILE = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.Kernels.rms_norm`."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.Kernels.add_rms_norm`."""
    return _norm(x, residual, weight, eps)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.Kernels.silu_multiply`."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        _silu_multiply[(num_tokens, -(-width // _SILU_TILE))](
            gate_up, out, gate_up.stride(0), width, tile=_SILU_TILE, num_warps=4
        )
    return out


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    num_rows = x.numel() // width if width else 0
    if not num_rows:
        return out
    in_row, x_outer, x_inner = _row_strides(x)
    added = x if residual is None else residual
    residual_in_row, residual_outer, residual_inner = _row_strides(added)
    if residual_in_row != in_row:
        raise ValueError("x and residual must have one shape")
    tile_width = padded(width)
    tile_rows = max(1, _NORM_TILE // tile_width)
    _norm_rows[(-(-num_rows // tile_rows),)](
        x,
        added,
        weight,
        out,
        eps,
        num_rows,
        x_outer,
        x_inner,
        residual_outer,
        residual_inner,
        rows_within=in_row,
        width=width,
        adds=residual is not None,
        tile_rows=tile_rows,
        tile_width=tile_width,
        num_warps=4 if tile_width <= 4096 else 8,
    )
    return out


def _row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Returns (rows within, outer stride, inner stride): row r begins at r // within * outer + r % within * inner.

    With these strides, heads inside a fused projection need no copy. Raises ValueError for other layouts.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError("the last dimension must be contiguous")
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return 1, x.stride(0), 0
    if not x.is_contiguous():
        raise ValueError("rows of four dimensions and more must be contiguous")
    return 1, x.shape[-1], 0


@kernel(unspecialized=("num_rows",))
def _norm_rows(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    residual_outer: tl.tensor,
    residual_inner: tl.tensor,
    rows_within: tl.constexpr,
    width: tl.constexpr,
    adds: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
) -> None:
    """Normalizes whole rows, which stay in registers from the sum of squares to the product with the weights."""
    rows = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    columns = tl.arange(0, tile_width)
    held = (rows < num_rows)[:, None] & (columns < width)[None, :]
    outer, inner = rows // rows_within, rows % rows_within
    places = x + (outer * x_outer + inner * x_inner)[:, None] + columns[None, :]
    values = tl.load(places, mask=held, other=0.0)
    if adds:
        places = residual + (outer * residual_outer + inner * residual_inner)[:, None] + columns[None, :]
        values = (values.to(tl.float32) + tl.load(places, mask=held, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(places, values, mask=held)
    wide = values.to(tl.float32)
    variance = tl.sum(wide * wide, 1) / width
    normed = (wide * tl.rsqrt(variance + eps)[:, None]).to(values.dtype)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0)
    result = normed.to(tl.float32) * weights.to(tl.float32)[None, :]
    tl.store(out + rows[:, None] * width + columns[None, :], result.to(values.dtype), mask=held)


@kernel()
def _silu_multiply(
    gate_up: tl.tensor, out: tl.tensor, row_stride: tl.tensor, width: tl.tensor, tile: tl.constexpr
) -> None:
    """Computes silu(gate) * up for one piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    held = columns < width
    places = gate_up + row * row_stride + columns
    gate = tl.load(places, mask=held, other=0.0)
    up = tl.load(places + width, mask=held, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    result = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + columns, result.to(gate.dtype), mask=held)
