"""Weights of linear layers in the order in which products read them, and the innermost product.

A weight is cut into panels of PANEL outputs; a panel holds, input after input, the numbers of its outputs::

    weight[out_size, in_size]          panels[num_panels, in_size, PANEL, 1]
      ┌────────── in ──────────┐         panel 0   in 0: PANEL outputs │ in 1: PANEL outputs │ …
      out  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ panel 0
           ░░░░░░░░░░░░░░░░░░ panel 1    zeros beyond out_size

Weights in bfloat16 lie in pairs of inputs, which is how processors multiply them that can::

    panels[num_panels, in_size / 2, PANEL, 2]
      panel 0   in 0 and 1: PANEL outputs, a pair each │ in 2 and 3: PANEL outputs, a pair each │ …

One row streams a panel once, as fast as memory gives it. Several rows share what is streamed: a tile of up to MAX_ROWS
rows × PANEL outputs keeps its sums in registers over a span of inputs (the register blocking of Goto and van de Geijn,
2008, without its packing of the left side: rows are few and stay in the cache).

Each output of each row is one running sum over the inputs, in their order, whatever the tile: a row has the same bits
in any batch. Weights may be stored in 16 bits; sums are float32. Where weights and inputs are bfloat16, on a processor
that multiplies those itself, a sum takes two inputs at a time; elsewhere both are widened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]

from kernels.cpu.compiler import types
from kernels.cpu.native import (
    BFLOAT16,
    FLOAT32,
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

# A tile has to leave registers for a vector of weights and one of inputs: 6 × 4 sums of 16 numbers fill the 32
# registers of AVX-512, 6 × 2 sums of 8 numbers the 16 of AVX2; narrower machines have 32 of 4 numbers.
_FEATURES = binding.get_host_cpu_features()
_LANES, _VECTORS = (16, 4) if _FEATURES.get("avx512f") else (8, 2) if _FEATURES.get("avx2") else (4, 4)

PANEL = _LANES * _VECTORS
"""Outputs of a panel."""

MAX_ROWS = 6
"""Rows of a tile."""

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
        """weights[out, in] of one or several layers with the same input, side by side; kept as `dtype`, but for
        bfloat16 that make no pairs: these become float32."""
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
    """How many inputs of an output lie side by side."""
    return 2 if storage == BFLOAT16 else 1


def _place(panels: torch.Tensor, weight: torch.Tensor, first: int) -> None:
    """Copies the rows of a weight to the outputs from `first` on: whole panels at once, the edges output by output."""
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
    rows: Any,
    row_bytes: Any,
    panel: Any,
    num_steps: Any,
    sums: Any,
    ahead: Any,
) -> Any:
    """sums[row, :] += rows[row] · panel, for the literal num_rows, in num_steps steps of `inputs_at_once(storage)`.

    rows[num_rows, inputs], row_bytes apart: float32, or bfloat16 where HAS_BFLOAT16_DOTS and storage is BFLOAT16 too;
    panel[num_steps, PANEL, inputs_at_once] stored; sums[num_rows, PANEL] float32. Meanwhile asks for the num_steps
    cache lines from `ahead` on, which are soon to be read.
    """
    signature = types.none(num_rows, row_storage, storage, *[types.int64] * 6)
    count, row_kind, kind = (literal.literal_value for literal in (num_rows, row_storage, storage))
    places = [(row, part) for row in range(count) for part in range(_VECTORS)]
    width = inputs_at_once(kind)
    vector_bytes, step_bytes = _LANES * width * storage_bytes(kind), width * storage_bytes(row_kind)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, row_bytes, panel, num_steps, sums, ahead = arguments[3:]
        starts = [builder.add(rows, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(count)]
        held = {at: codegen.alloca_once_value(builder, constant(_F32, 0.0, _LANES)) for at in places}
        homes = {
            (row, part): builder.add(sums, ir.Constant(_I64, (row * PANEL + part * _LANES) * 4)) for row, part in places
        }
        for at in places:
            builder.store(emit_load(builder, homes[at], FLOAT32, _LANES), held[at])
        with codegen.for_range(builder, num_steps) as loop:
            line = builder.add(panel, builder.mul(loop.index, ir.Constant(_I64, _VECTORS * vector_bytes)))
            emit_prefetch(builder, builder.add(ahead, builder.mul(loop.index, ir.Constant(_I64, LINE_BYTES))))
            offset = builder.mul(loop.index, ir.Constant(_I64, step_bytes))
            weights = [
                _emit_weights(builder, builder.add(line, ir.Constant(_I64, part * vector_bytes)), row_kind, kind)
                for part in range(_VECTORS)
            ]
            for row, start in enumerate(starts):
                numbers = _emit_numbers(builder, builder.add(start, offset), row_kind, width)
                for part in range(_VECTORS):
                    home = held[row, part]
                    builder.store(_emit_sum(builder, numbers, weights[part], builder.load(home)), home)
        for at in places:
            emit_store(builder, builder.load(held[at]), homes[at], FLOAT32)
        return context.get_dummy_value()

    return signature, generate


def _emit_weights(builder: Builder, address: Value, row_kind: int, kind: int) -> list[Value]:
    """The weights of _LANES outputs for the inputs of one step: a vector of pairs, or one of float32 an input."""
    if kind != BFLOAT16:
        return [emit_load(builder, address, kind, _LANES)]
    pairs = emit_load_pairs(builder, address, _LANES)
    return [pairs] if row_kind == BFLOAT16 else list(emit_widen_pairs(builder, pairs))


def _emit_numbers(builder: Builder, address: Value, row_kind: int, width: int) -> list[Value]:
    """The inputs of one step in every lane, as the weights have them."""
    if row_kind == BFLOAT16:
        return [emit_splat(builder, emit_load_pairs(builder, address, 1), _LANES)]
    places = [builder.add(address, ir.Constant(_I64, i * 4)) for i in range(width)]
    return [emit_splat(builder, emit_load(builder, place, FLOAT32, 1), _LANES) for place in places]


def _emit_sum(builder: Builder, numbers: list[Value], weights: list[Value], total: Value) -> Value:
    """total + numbers · weights."""
    for number, weight in zip(numbers, weights, strict=True):
        if number.type.element == _F32:
            total = call_llvm(builder, "llvm.fma", number, weight, total)
        else:
            total = emit_dot_pairs(builder, number, weight, total)
    return total
