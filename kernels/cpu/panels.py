"""Weights of linear layers in the order in which products read them, and the innermost loop of the product.

A weight is cut into panels of PANEL outputs. A panel holds, for one input after the other, the weights of its outputs::

    weight[out_size, in_size]          panels[num_panels, in_size, PANEL, 1]
      ┌────────── in ──────────┐         panel 0   in 0: PANEL outputs │ in 1: PANEL outputs │ …
      out  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ panel 0
           ░░░░░░░░░░░░░░░░░░ panel 1    zeros beyond out_size

Weights in bfloat16 are stored in pairs of inputs, as the processor's bfloat16 instructions take them::

    panels[num_panels, in_size / 2, PANEL, 2]
      panel 0   in 0 and 1: PANEL outputs, a pair each │ in 2 and 3: PANEL outputs, a pair each │ …

A single row reads a panel once, at the bandwidth of memory. Several rows share each read: a tile of up to MAX_ROWS
rows × PANEL outputs keeps its sums in registers over a span of inputs. This is the register blocking of Goto and van
de Geijn, 2008, without packing the left side, since the few rows stay in the cache.

Each output of each row is one running sum over the inputs in their order in every tile, so a row has the same bits
in any batch. Weights may be stored in 16 bits; sums are float32. If weights and inputs are bfloat16 and the processor
multiplies bfloat16 faster than float32, a sum takes two inputs at a time, or a block of them in `kernels.cpu.amx`;
otherwise both are widened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.extending import overload

from kernels.cpu.amx import BLOCK, HAS_AMX, MATRIX, ROWS, multiply_matrix
from kernels.cpu.compiler import types
from kernels.cpu.native import (
    BFLOAT16,
    FLOAT32,
    HAS_BFLOAT16_DOTS,
    LINE_BYTES,
    Builder,
    Value,
    call_llvm,
    codegen,
    constant,
    emit_dot_pairs,
    emit_load,
    emit_load_pairs,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_widen_pairs,
    instruction,
    storage_bytes,
    storage_of,
)
from kernels.memory import zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

# A tile has to leave registers for a vector of weights and one of inputs. 6 × 4 sums of 16 numbers suit the 32
# registers of AVX-512, 6 × 2 sums of 8 suit the 16 of AVX2; narrower machines have 32 registers of 4 numbers.
_FEATURES = binding.get_host_cpu_features()
LANES, _VECTORS = (16, 4) if _FEATURES.get("avx512f") else (8, 2) if _FEATURES.get("avx2") else (4, 4)

PANEL = LANES * _VECTORS
"""Number of outputs in a panel."""

MAX_ROWS = 6
"""Maximum number of rows in a tile."""

_F32, _I64 = ir.FloatType(), ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight[out_size, in_size], packed as above; bias[num_panels * PANEL] float32."""

    in_size: int
    out_size: int
    panels: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def pack(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None, dtype: torch.dtype) -> Panels:
        """Packs weights[out, in] of one or several layers with the same input, side by side, as `dtype`.

        bfloat16 weights with an odd number of inputs cannot be stored in pairs and become float32.
        """
        in_size, out_size = weights[0].shape[1], sum(len(weight) for weight in weights)
        num_panels = -(-out_size // PANEL)
        if storage_of(dtype) == BFLOAT16 and in_size % 2:
            dtype = torch.float32
        width = inputs_at_once(storage_of(dtype))
        panels = zeros((num_panels, in_size // width, PANEL, width), dtype)
        first = 0
        for weight in weights:
            _place(panels, weight, first)
            first += len(weight)
        bias = None
        if biases is not None:
            bias = torch.zeros(num_panels * PANEL, dtype=torch.float32)
            torch.cat([part.float() for part in biases], out=bias[:out_size])
        return cls(in_size, out_size, panels, bias)

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


def inputs_at_once(storage: int) -> int:
    """Returns how many inputs of an output are stored side by side, for a storage or the format of rows."""
    return 2 if storage in (BFLOAT16, MATRIX) else 1


def row_format(storage: int, weight_storage: int, num_inputs: int) -> int:
    """Returns how a product over num_inputs inputs takes its rows, if they are stored as `storage`.

    FLOAT32: as float32, widened if they are stored in 16 bits. BFLOAT16: as pairs. MATRIX: as blocks, see
    `kernels.cpu.amx`.
    """
    if not storage == weight_storage == BFLOAT16:
        return FLOAT32
    if HAS_AMX and num_inputs % BLOCK == 0:
        return MATRIX
    return BFLOAT16 if HAS_BFLOAT16_DOTS else FLOAT32


def tile_rows(row_format: int) -> int:
    """Returns the maximum number of rows of a tile."""
    return ROWS if row_format == MATRIX else MAX_ROWS


def _place(panels: torch.Tensor, weight: torch.Tensor, first: int) -> None:
    """Copies the rows of a weight to the outputs from `first` on: whole panels together, partial ones separately."""
    done, width = 0, panels.shape[-1]
    while done < len(weight):
        panel, column = divmod(first + done, PANEL)
        if column == 0 and (num_whole := (len(weight) - done) // PANEL):
            rows = weight[done : done + num_whole * PANEL].view(num_whole, PANEL, -1, width)
            panels[panel : panel + num_whole] = rows.transpose(1, 2)
            done += num_whole * PANEL
        else:
            count = min(PANEL - column, len(weight) - done)
            rows = weight[done : done + count].view(count, -1, width)
            panels[panel, :, column : column + count] = rows.transpose(0, 1)
            done += count


@instruction
def multiply_rows(
    typingctx: Any,
    num_rows: Any,
    row_storage: Any,
    storage: Any,
    adds: Any,
    rows: Any,
    row_bytes: Any,
    panel: Any,
    num_steps: Any,
    sums: Any,
    sum_bytes: Any,
    ahead: Any,
) -> Any:
    """Computes sums[row, :] += rows[row] · panel in num_steps steps of `inputs_at_once(storage)` inputs.

    num_rows, the storages and `adds` are literals; sums begin at 0 if adds is 0. rows[num_rows, inputs], row_bytes
    apart: float32, or bfloat16 if HAS_BFLOAT16_DOTS and storage is BFLOAT16; panel[num_steps, PANEL, inputs_at_once]
    stored; sums[num_rows, PANEL] float32, sum_bytes apart. Also prefetches the num_steps cache lines from `ahead` on,
    which are read soon, unless it is None.
    """
    signature = types.none(num_rows, row_storage, storage, adds, *[types.int64] * 6, ahead)
    count, row_kind, kind, added = (literal.literal_value for literal in (num_rows, row_storage, storage, adds))
    places = [(row, part) for row in range(count) for part in range(_VECTORS)]
    width = inputs_at_once(kind)
    vector_bytes, step_bytes = LANES * width * storage_bytes(kind), width * storage_bytes(row_kind)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, row_bytes, panel, num_steps, sums, sum_bytes, line_ahead = arguments[4:]
        starts = [builder.add(rows, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(count)]
        held = {at: codegen.alloca_once_value(builder, constant(_F32, 0.0, LANES)) for at in places}
        totals = [builder.add(sums, builder.mul(sum_bytes, ir.Constant(_I64, row))) for row in range(count)]
        addresses = {(row, part): builder.add(totals[row], ir.Constant(_I64, part * LANES * 4)) for row, part in places}
        for at in places if added else []:
            builder.store(emit_load(builder, addresses[at], FLOAT32, LANES), held[at])
        with codegen.for_range(builder, num_steps) as loop:
            line = builder.add(panel, builder.mul(loop.index, ir.Constant(_I64, _VECTORS * vector_bytes)))
            if ahead != types.none:
                emit_prefetch(builder, builder.add(line_ahead, builder.mul(loop.index, ir.Constant(_I64, LINE_BYTES))))
            offset = builder.mul(loop.index, ir.Constant(_I64, step_bytes))
            weights = [
                _emit_weights(builder, builder.add(line, ir.Constant(_I64, part * vector_bytes)), row_kind, kind)
                for part in range(_VECTORS)
            ]
            for row, start in enumerate(starts):
                numbers = emit_numbers(builder, builder.add(start, offset), row_kind, width)
                for part in range(_VECTORS):
                    total = held[row, part]
                    builder.store(emit_sum(builder, numbers, weights[part], builder.load(total)), total)
        for at in places:
            emit_store(builder, builder.load(held[at]), addresses[at])
        return context.get_dummy_value()

    return signature, generate


def _emit_weights(builder: Builder, address: Value, row_kind: int, kind: int) -> list[Value]:
    """Loads the weights of LANES outputs for one step: a vector of pairs, or one vector of float32 per input."""
    if kind != BFLOAT16:
        return [emit_load(builder, address, kind, LANES)]
    pairs = emit_load_pairs(builder, address, LANES)
    return [pairs] if row_kind == BFLOAT16 else list(emit_widen_pairs(builder, pairs))


def emit_numbers(builder: Builder, address: Value, row_kind: int, width: int) -> list[Value]:
    """Loads the inputs of one step into every lane, in the format of the weights."""
    if row_kind != FLOAT32:
        return [emit_splat(builder, emit_load_pairs(builder, address, 1), LANES)]
    places = [builder.add(address, ir.Constant(_I64, i * 4)) for i in range(width)]
    return [emit_splat(builder, emit_load(builder, place, FLOAT32, 1), LANES) for place in places]


def emit_sum(builder: Builder, numbers: list[Value], weights: list[Value], total: Value) -> Value:
    """Returns total + numbers · weights."""
    for number, weight in zip(numbers, weights, strict=True):
        if number.type.element == _F32:
            total = call_llvm(builder, "llvm.fma", number, weight, total)
        else:
            total = emit_dot_pairs(builder, number, weight, total)
    return total


def multiply(
    num_rows: int,
    full_rows: int,
    row_format: Any,
    storage: Any,
    adds: Any,
    rows: int,
    row_bytes: int,
    panel: int,
    num_steps: int,
    sums: int,
    sum_bytes: int,
    ahead: int | None,
) -> None:
    """Multiplies one tile of one to `tile_rows` rows, in compiled code; see `multiply_rows`. row_format is a literal.

    Rows in the format MATRIX need as many steps as make whole blocks, and `begin_products` with full_rows before.
    """
    raise NotImplementedError


def _in_vectors(
    num_rows: int,
    full_rows: int,
    row_format: Any,
    storage: Any,
    adds: Any,
    rows: int,
    row_bytes: int,
    panel: int,
    num_steps: int,
    sums: int,
    sum_bytes: int,
    ahead: int | None,
) -> None:
    if num_rows == 6:
        multiply_rows(6, row_format, storage, adds, rows, row_bytes, panel, num_steps, sums, sum_bytes, ahead)
    elif num_rows == 5:
        multiply_rows(5, row_format, storage, adds, rows, row_bytes, panel, num_steps, sums, sum_bytes, ahead)
    elif num_rows == 4:
        multiply_rows(4, row_format, storage, adds, rows, row_bytes, panel, num_steps, sums, sum_bytes, ahead)
    elif num_rows == 3:
        multiply_rows(3, row_format, storage, adds, rows, row_bytes, panel, num_steps, sums, sum_bytes, ahead)
    elif num_rows == 2:
        multiply_rows(2, row_format, storage, adds, rows, row_bytes, panel, num_steps, sums, sum_bytes, ahead)
    else:
        multiply_rows(1, row_format, storage, adds, rows, row_bytes, panel, num_steps, sums, sum_bytes, ahead)


def _in_matrix_registers(
    num_rows: int,
    full_rows: int,
    row_format: Any,
    storage: Any,
    adds: Any,
    rows: int,
    row_bytes: int,
    panel: int,
    num_steps: int,
    sums: int,
    sum_bytes: int,
    ahead: int | None,
) -> None:
    multiply_matrix(
        num_rows, full_rows, adds, rows, row_bytes, panel, num_steps // (BLOCK // 2), sums, sum_bytes, ahead
    )


@overload(multiply, prefer_literal=True)
def _choose(
    num_rows: int,
    full_rows: int,
    row_format: Any,
    storage: Any,
    adds: Any,
    rows: int,
    row_bytes: int,
    panel: int,
    num_steps: int,
    sums: int,
    sum_bytes: int,
    ahead: int | None,
) -> Any:
    if not isinstance(row_format, types.Literal):
        return None  # numba asks again with literals
    return _in_matrix_registers if row_format.literal_value == MATRIX else _in_vectors
