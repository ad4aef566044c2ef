"""Norms and the gated activation, each in one pass over memory."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from kernels.cpu.compiler import compiled
from kernels.cpu.native import array, count_up, exp2, read, rounded, storage_of, write
from kernels.cpu.team import Job, Kernel, job_dtype

# One thread handles fewer numbers than this in about ten microseconds.
_MIN_TEAM_NUMBERS = 65536
_UNIT_NUMBERS = 4096

# Each of num_rows rows holds num_inner vectors of `width` numbers, inner_bytes apart: the heads of a fused projection,
# or a single vector. out is contiguous.
NORM_JOB = job_dtype(
    """x x_outer_bytes x_inner_bytes residual residual_outer_bytes residual_inner_bytes weight out
    num_inner num_rows width unit_rows number_bytes""",
    "eps",
)
SILU_JOB = job_dtype("gate_up row_bytes out num_rows width unit_rows number_bytes")
# indices: int32, the row of the source that becomes each row of out.
TAKE_JOB = job_dtype("source source_row_bytes row_bytes indices out num_rows")

_norm_job = Job(NORM_JOB)
_silu_job = Job(SILU_JOB)
_MINUS_LOG2_E = np.float32(-math.log2(math.e))


@cache
def norm_kernel(storage: int) -> Kernel:
    """Returns the kernel for the RMS norm of rows; if there is a residual, it is added first."""

    def norm(address: int) -> None:
        job = array(address, 1, NORM_JOB)[0]
        width, weight = job.width, job.weight
        num_vectors = job.num_rows * job.num_inner
        while True:
            first = count_up(address) * job.unit_rows
            if first >= num_vectors:
                return
            for row in range(first, min(first + job.unit_rows, num_vectors)):
                outer, inner = row // job.num_inner, row % job.num_inner
                x = job.x + outer * job.x_outer_bytes + inner * job.x_inner_bytes
                squares = np.float32(0)
                if job.residual != 0:
                    added = x
                    x = job.residual + outer * job.residual_outer_bytes + inner * job.residual_inner_bytes
                    for i in range(width):
                        total = rounded(storage, read(storage, x, i) + read(storage, added, i))
                        write(storage, x, i, total)
                        squares += total * total
                else:
                    for i in range(width):
                        squares += read(storage, x, i) * read(storage, x, i)
                scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(job.eps))
                out = job.out + row * width * job.number_bytes
                for i in range(width):
                    normed = rounded(storage, read(storage, x, i) * scale)
                    write(storage, out, i, normed * read(storage, weight, i))

    return Kernel(compiled(norm, reorder=True))


@cache
def silu_kernel(storage: int) -> Kernel:
    """Returns the kernel for silu(gate) * up of rows."""

    def silu(address: int) -> None:
        job = array(address, 1, SILU_JOB)[0]
        width = job.width
        while True:
            first = count_up(address) * job.unit_rows
            if first >= job.num_rows:
                return
            for row in range(first, min(first + job.unit_rows, job.num_rows)):
                gates = job.gate_up + row * job.row_bytes
                ups = gates + width * job.number_bytes
                out = job.out + row * width * job.number_bytes
                for i in range(width):
                    gate = read(storage, gates, i)
                    activated = gate / (np.float32(1) + exp2(gate * _MINUS_LOG2_E))
                    write(storage, out, i, rounded(storage, activated) * read(storage, ups, i))

    return Kernel(compiled(silu))


@cache
def take_kernel() -> Kernel:
    """Returns the kernel that copies rows of a table of any dtype; a row is a unit."""

    def take(address: int) -> None:
        job = array(address, 1, TAKE_JOB)[0]
        indices = array(job.indices, job.num_rows, np.int32)
        while True:
            row = count_up(address)
            if row >= job.num_rows:
                return
            source = array(job.source + indices[row] * job.source_row_bytes, job.row_bytes, np.uint8)
            out = array(job.out + row * job.row_bytes, job.row_bytes, np.uint8)
            for i in range(job.row_bytes):
                out[i] = source[i]

    return Kernel(compiled(take))


def _unit_rows(width: int) -> int:
    """Returns the number of rows of `width` numbers that a thread takes at a time."""
    return max(1, _UNIT_NUMBERS // width)


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Runs the norm. x and residual may be strided views of up to three dimensions with a contiguous last one."""
    dtype = x.dtype
    if weight.dtype is not dtype or (residual is not None and residual.dtype is not dtype):
        raise TypeError("x, residual and weight must have one dtype")
    if weight.numel() != x.shape[-1] or (residual is not None and residual.shape != x.shape):
        raise ValueError("residual must have the shape of x, and weight its last dimension")

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    fields = norm_fields(x, residual, weight, out, eps)
    num_vectors = out.numel() // x.shape[-1]
    job = _norm_job.fill(num_rows=num_vectors // int(fields["num_inner"]), **fields)
    _run(norm_kernel(storage_of(dtype)), job, out.numel())
    return out


def norm_fields(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> dict[str, float]:
    """Returns the fields of a NORM_JOB over the last dimension of x, except num_rows."""
    number_bytes, width = x.element_size(), x.shape[-1]
    outer, inner, num_inner = _rows(x, number_bytes)
    residual_outer, residual_inner, _ = (0, 0, 0) if residual is None else _rows(residual, number_bytes)
    return {
        "x": x.data_ptr(),
        "x_outer_bytes": outer,
        "x_inner_bytes": inner,
        "residual": 0 if residual is None else residual.data_ptr(),
        "residual_outer_bytes": residual_outer,
        "residual_inner_bytes": residual_inner,
        "weight": weight.data_ptr(),
        "out": out.data_ptr(),
        "num_inner": num_inner,
        "width": width,
        "unit_rows": _unit_rows(width),
        "number_bytes": number_bytes,
        "eps": eps,
    }


def silu_fields(gate_up: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    """Returns the fields of a SILU_JOB, except num_rows."""
    number_bytes, width = gate_up.element_size(), out.shape[1]
    return {
        "gate_up": gate_up.data_ptr(),
        "row_bytes": gate_up.stride(0) * number_bytes,
        "out": out.data_ptr(),
        "width": width,
        "unit_rows": _unit_rows(width),
        "number_bytes": number_bytes,
    }


def take_fields(source: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    """Returns the fields of a TAKE_JOB, except indices and num_rows. Rows of `source` may be apart from each other."""
    number_bytes = source.element_size()
    return {
        "source": source.data_ptr(),
        "source_row_bytes": source.stride(0) * number_bytes,
        "row_bytes": out.stride(0) * number_bytes,
        "out": out.data_ptr(),
    }


def _rows(x: torch.Tensor, number_bytes: int) -> tuple[int, int, int]:
    """Returns the strides of the rows of x: (outer_bytes, inner_bytes, num_inner)."""
    strides = x.stride()
    if strides[-1] == 1:
        if len(strides) == 2:
            return strides[0] * number_bytes, 0, 1
        if len(strides) == 3:
            return strides[0] * number_bytes, strides[1] * number_bytes, x.shape[1]
    if x.is_contiguous():
        return x.shape[-1] * number_bytes, 0, 1
    raise ValueError(f"rows of a tensor with shape {tuple(x.shape)} and strides {strides} have no common distance")


def _run(kernel: Kernel, job: int, num_numbers: int) -> None:
    if num_numbers < _MIN_TEAM_NUMBERS:
        kernel.run_brief(job)
    else:
        kernel.run_in_team(job)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.Kernels.rms_norm`."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.Kernels.add_rms_norm`."""
    return _norm(x, residual, weight, eps)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.Kernels.silu_multiply`."""
    num_rows, double_width = gate_up.shape
    if gate_up.stride(1) != 1:
        raise ValueError("the last dimension of gate_up must be contiguous")
    width = double_width // 2
    out = gate_up.new_empty(num_rows, width)
    job = _silu_job.fill(num_rows=num_rows, **silu_fields(gate_up, out))
    _run(silu_kernel(storage_of(gate_up.dtype)), job, num_rows * width)
    return out
