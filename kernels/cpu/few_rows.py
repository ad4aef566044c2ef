"""The products of attention for a few rows, as in decode: keys and values are multiplied in registers.

Their bits are those of the products in panels: see `kernels.cpu.tiles`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.amx import BLOCK, MATRIX
from kernels.cpu.compiler import types
from kernels.cpu.native import FLOAT32, Builder, Value, codegen, constant, emit_store, instruction, storage_bytes
from kernels.cpu.panels import LANES, emit_numbers, emit_sum, inputs_at_once, row_format
from kernels.cpu.softmax import SCORE_LANES, SCORE_STRIDE
from kernels.cpu.tokens import (
    after,
    at_index,
    emit_ahead,
    emit_columns,
    emit_value,
    num_words,
    padded_size,
    place_of,
    tokens_ahead,
    words_at_once,
)

# Up to so many rows, a panel in memory costs more than it saves. Two vectors of them fill half of the registers.
FEW_ROWS = 8 if LANES == 16 else 4
_MAX_SUMS = 16 if LANES == 16 else 8

# As many vectors of sums keep the multipliers busy: two of them, each with a latency of four cycles.
_MIN_SUMS = 8

_F32, _I64 = ir.FloatType(), ir.IntType(64)


def few_format(row_kind: int) -> int:
    """Returns the format that a few rows of this format take: vectors multiply those of MATRIX as float32."""
    return FLOAT32 if row_kind == MATRIX else row_kind


class _Sum:
    """A running sum of LANES outputs in registers, in the order of the products of this row format."""

    def __init__(self, builder: Builder, row_kind: int) -> None:
        self._builder = builder
        zero = constant(_F32, 0.0, LANES)
        self._total = codegen.alloca_once_value(builder, zero)
        # The matrix format sums the inputs of a block with even numbers and those with odd ones.
        self._halves = [codegen.alloca_once_value(builder, zero) for _ in range(2 if row_kind == MATRIX else 0)]
        for place in (self._total, *self._halves):
            builder.store(zero, place)

    def add(self, index: int, number: Value, inputs: Value) -> None:
        """Adds the product of a number of a row, in every lane, and inputs. index: the number of the input."""
        place = self._halves[index % 2] if self._halves else self._total
        total = emit_sum(self._builder, [number], [inputs], self._builder.load(place))
        self._builder.store(total, place)

    def end_block(self) -> None:
        """Ends a block of inputs."""
        builder = self._builder
        if self._halves:
            block = builder.fadd(*(builder.load(half) for half in self._halves))
            builder.store(builder.fadd(builder.load(self._total), block), self._total)
            for half in self._halves:
                builder.store(constant(_F32, 0.0, LANES), half)

    def load(self) -> Value:
        return self._builder.load(self._total)


@instruction
def score_few(
    typingctx: Any,
    head_dim: Any,
    storage: Any,
    num_rows: Any,
    rows: Any,
    places: Any,
    num_tokens: Any,
    scores: Any,
) -> Any:
    """Computes scores of num_tokens tokens as `pack_keys` and `multiply` do, without a panel in memory.

    head_dim, a multiple of LANES, storage and num_rows are literals; num_tokens is a multiple of SCORE_LANES. Rows are
    in the format `few_format`. A sum can be added to only once in the latency of a product, so several groups of LANES
    tokens take turns.
    """
    dim, kind, count = (literal.literal_value for literal in (head_dim, storage, num_rows))
    row_kind, num_groups = row_format(kind, kind, dim), min(SCORE_LANES // LANES, _MIN_SUMS // count)
    own_kind = few_format(row_kind)
    num_steps, num_inputs = num_words(dim, kind) // words_at_once(dim, kind), dim // inputs_at_once(own_kind)
    num_blocks = dim // BLOCK if row_kind == MATRIX else 1
    block_steps = num_steps // num_blocks
    held_at = [(group, row) for group in range(num_groups) for row in range(count)]

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, places, num_tokens, scores = arguments[3:]
        num_turns = builder.udiv(num_tokens, ir.Constant(_I64, LANES * num_groups))
        with codegen.for_range(builder, num_turns) as turn:
            first = at_index(builder, places, turn.index, LANES * num_groups * 8)
            groups = [after(builder, first, group * LANES * 8) for group in range(num_groups)]
            tokens = [[place_of(builder, group, token) for token in range(LANES)] for group in groups]
            held = {at: _Sum(builder, row_kind) for at in held_at}
            with codegen.for_range(builder, ir.Constant(_I64, num_blocks)) as block:
                with codegen.for_range(builder, ir.Constant(_I64, block_steps)) as loop:
                    step = at_index(builder, loop.index, block.index, block_steps)
                    for group in range(num_groups):
                        columns = emit_columns(builder, dim, kind, own_kind, groups[group], tokens[group], step)
                        numbers = at_index(builder, rows, step, len(columns) * 4)
                        for i, column in enumerate(columns):
                            for row in range(count):
                                place = after(builder, numbers, (row * num_inputs + i) * 4)
                                held[group, row].add(i, emit_numbers(builder, place, own_kind, 1)[0], column)
                for total in held.values():
                    total.end_block()
            target = at_index(builder, scores, turn.index, LANES * num_groups * 4)
            for (group, row), total in held.items():
                place = after(builder, target, row * SCORE_STRIDE * 4 + group * LANES * 4)
                emit_store(builder, total.load(), place)
        return context.get_dummy_value()

    return types.none(head_dim, storage, num_rows, *[types.int64] * 4), generate


@instruction
def weigh_few(
    typingctx: Any,
    head_dim: Any,
    storage: Any,
    num_rows: Any,
    scores: Any,
    score_bytes: Any,
    places: Any,
    num_tokens: Any,
    sums: Any,
) -> Any:
    """Computes weighted sums as `pack_values` and `multiply` do, without a panel in memory.

    head_dim, a multiple of LANES, storage and num_rows are literals. Rows of scores are score_bytes apart, in the
    format `few_format`.
    """
    dim, kind, count = (literal.literal_value for literal in (head_dim, storage, num_rows))
    row_kind, number_bytes = row_format(kind, kind, dim), storage_bytes(kind)
    own_kind = few_format(row_kind)
    # A step is one input of the sums, or a pair of them; the matrix format takes two inputs one after the other.
    width = inputs_at_once(row_kind)
    num_inputs = width // inputs_at_once(own_kind)
    num_parts = dim // LANES
    most = max(1, _MAX_SUMS // (count * num_inputs))

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        scores, score_bytes, places, num_tokens, sums = arguments[3:]
        rows = [builder.add(scores, builder.mul(score_bytes, ir.Constant(_I64, row))) for row in range(count)]
        num_steps = builder.udiv(num_tokens, ir.Constant(_I64, width))
        num_blocks, block_steps = ir.Constant(_I64, 1), num_steps
        if row_kind == MATRIX:
            num_blocks, block_steps = builder.udiv(num_tokens, ir.Constant(_I64, BLOCK)), ir.Constant(_I64, BLOCK // 2)
        held = {(row, part): _Sum(builder, row_kind) for row in range(count) for part in range(num_parts)}
        with codegen.for_range(builder, num_blocks) as block:
            for first in range(0, num_parts, most):
                parts = range(first, min(first + most, num_parts))
                with codegen.for_range(builder, block_steps) as loop:
                    step = builder.add(builder.mul(block.index, block_steps), loop.index)
                    own = at_index(builder, places, step, width * 8)
                    tokens = [place_of(builder, own, token) for token in range(width)]
                    if first == 0:
                        ahead = ir.Constant(_I64, tokens_ahead(dim, kind))
                        emit_ahead(builder, own, ahead, width, dim * number_bytes)
                    for i in range(num_inputs):
                        taken = tokens[i * width // num_inputs : (i + 1) * width // num_inputs]
                        places_of = [
                            after(builder, at_index(builder, row, step, num_inputs * 4), i * 4) for row in rows
                        ]
                        numbers = [emit_numbers(builder, place, own_kind, 1)[0] for place in places_of]
                        for part in parts:
                            value = emit_value(builder, kind, taken, part * LANES * number_bytes, LANES)
                            for row in range(count):
                                held[row, part].add(i, numbers[row], value)
                for part in parts:
                    for row in range(count):
                        held[row, part].end_block()
        for (row, part), total in held.items():
            place = after(builder, sums, (row * padded_size(dim) + part * LANES) * 4)
            emit_store(builder, total.load(), place)
        return context.get_dummy_value()

    return types.none(head_dim, storage, num_rows, *[types.int64] * 5), generate
