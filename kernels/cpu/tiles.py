"""The products and the softmax of attention, for a chunk of tokens and a tile of rows.

A *row* is one query of one head; a *token* is one key or value of one kv head. Keys and values are copied into panels,
which `kernels.cpu.panels` multiplies as it does the weights of a linear layer; all rows of a tile share the copy::

    score    scores[row, token]  = rows[row] · keys[token]                    a panel of keys: its outputs are tokens
    soften   scores[row, token]  = 2 ** (scale * scores[row, token] - greatest)
    weigh    sums[row, :]        = Σ scores[row, token] * values[token]       panels of values: their inputs are tokens

A product keeps MAX_ROWS rows × PANEL sums in registers; a panel of 64 tokens stays in the nearest caches. A few rows,
as in decode, multiply keys and values in registers, without a panel in memory. If the processor multiplies bfloat16
faster than float32, rows, keys and values of that dtype stay as they are, in pairs of inputs, and the weights of the
values are rounded to it; otherwise everything is float32.

Every score is one running sum over the head, and every weighted sum one over the tokens from the start of the chunk. In
matrix registers a sum adds blocks of inputs, and a few rows, which vectors multiply, add in the same order (see
`kernels.cpu.amx`). So the bits of a row do not depend on the rows computed with it, nor on where its prompt was cut. No
instruction has a fast-math flag.

Few rows are done with a token before memory delivers the next one. Reading a token therefore prefetches a later one.
Spread out, the prefetches complete during the computation; issued all at once, they would stall the thread.
"""

from __future__ import annotations

import math
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.amx import BLOCK, MATRIX, begin_products, count_denormals, end_products
from kernels.cpu.compiler import SOURCES, compiled, inlined, types
from kernels.cpu.native import (
    BFLOAT16,
    FLOAT32,
    LINE_BYTES,
    Builder,
    Value,
    call_llvm,
    codegen,
    constant,
    emit_load,
    emit_load_pairs,
    emit_prefetch,
    emit_round_pairs,
    emit_splat,
    emit_store,
    emit_widen,
    emit_widen_pairs,
    instruction,
    lanes_of,
    read,
    shaped,
    storage_bytes,
    write,
)
from kernels.cpu.panels import LANES, PANEL, emit_numbers, emit_sum, inputs_at_once, multiply, row_format, tile_rows

if TYPE_CHECKING:
    from collections.abc import Callable

# Scores of one row that are held at once: a context is cut into chunks of this many tokens, at multiples of it.
CHUNK = 512

# Numbers from the scores of one row to the next; a power of two would use few sets of the first-level cache.
SCORE_STRIDE = CHUNK + 16

# The softmax of a row processes its scores in vectors of this size.
SCORE_LANES = 32

# The tokens of a chunk that are computed begin at a multiple of this, and are a multiple of SCORE_LANES.
STRIP = max(PANEL, SCORE_LANES)

# The most query rows of a tile of a prompt, by their format: enough that copying keys and values costs little, few
# enough that the scores of a chunk stay in a second-level cache of 1 MiB, or of 2 MiB. A multiple of `tile_rows`.
TILE_ROWS = {FLOAT32: 192, BFLOAT16: 192, MATRIX: 384}

# Tokens that the weighted sums take at once. Matrix registers hold sums apart from the inputs, and are slow to load.
_SPANS = {FLOAT32: 64, BFLOAT16: 64, MATRIX: CHUNK}

# Up to so many rows, a panel in memory costs more than it saves. Two vectors of them fill half of the registers.
_FEW_ROWS = 8 if LANES == 16 else 4
_MAX_SUMS = 16 if LANES == 16 else 8

# As many vectors of sums keep the multipliers busy: two of them, each with a latency of four cycles.
_MIN_SUMS = 8

# Bytes that are prefetched ahead: a little more than memory delivers within its latency.
_BYTES_AHEAD = 8192
MAX_TOKENS_AHEAD = 64

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def padded_size(head_dim: int) -> int:
    """Returns head_dim, rounded up to whole panels: the numbers of a weighted sum."""
    return -(-head_dim // PANEL) * PANEL


def panel_words(row_kind: int) -> int:
    """Returns the words of scratch memory for panels, for each number of `padded_size`. A word is 4 bytes."""
    return _SPANS[row_kind] // inputs_at_once(row_kind)


def _num_words(head_dim: int, storage: int) -> int:
    """Returns the number of words of a key. A word is 4 bytes: one number, or two of 16 bits."""
    return head_dim * storage_bytes(storage) // 4


def _words_at_once(head_dim: int, storage: int) -> int:
    """Returns how many words of a key are transposed at once: 16 bytes, which vector shuffles move as a whole."""
    return gcd(4, _num_words(head_dim, storage))


def tokens_ahead(head_dim: int, storage: int) -> int:
    """Returns how many tokens ahead to prefetch."""
    return min(MAX_TOKENS_AHEAD, max(LANES, _BYTES_AHEAD // (head_dim * storage_bytes(storage))))


def _at(builder: Builder, base: Value, index: Value, num_bytes: int) -> Value:
    """Returns base + index * num_bytes."""
    return builder.add(base, builder.mul(index, ir.Constant(_I64, num_bytes)))


def _after(builder: Builder, base: Value, num_bytes: int) -> Value:
    """Returns base + num_bytes."""
    return builder.add(base, ir.Constant(_I64, num_bytes))


def _shuffle(builder: Builder, a: Value, b: Value, lanes: list[int]) -> Value:
    """Returns a vector of the given lanes of a and b; the lanes of b are numbered after those of a."""
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


def _halves(builder: Builder, vector: Value) -> tuple[Value, Value]:
    """Returns the lower and the upper half of a vector."""
    lanes = vector.type.count // 2
    lower = _shuffle(builder, vector, vector, list(range(lanes)))
    return lower, _shuffle(builder, vector, vector, list(range(lanes, 2 * lanes)))


def _transposed(builder: Builder, vectors: list[Value]) -> list[Value]:
    """Returns vectors with lane g * width + i of vector j where lane g * width + j of vector i was; width vectors.

    Merging the first half of all numbers of a group g with the second half, one by one, rotates the bits of a number's
    place in the group. After as many turns as the number of a vector has bits, i and j have changed places.
    """
    width, lanes = len(vectors), vectors[0].type.count
    merged = [i // 2 + i % 2 * lanes for i in range(2 * width)]
    halves = [[g + i for g in range(0, lanes, width) for i in half] for half in (merged[:width], merged[width:])]
    for _ in range(width.bit_length() - 1):
        pairs = list(zip(vectors[: width // 2], vectors[width // 2 :], strict=True))
        vectors = [_shuffle(builder, a, b, half) for a, b in pairs for half in halves]
    return vectors


def _joined(builder: Builder, vectors: list[Value]) -> Value:
    """Returns the vectors one after the other as one."""
    while len(vectors) > 1:
        lanes = list(range(2 * vectors[0].type.count))
        vectors = [_shuffle(builder, a, b, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _place_of(builder: Builder, places: Value, token: Value | int) -> Value:
    """Loads the address of a token."""
    at = _after(builder, places, token * 8) if isinstance(token, int) else _at(builder, places, token, 8)
    return builder.load(builder.inttoptr(at, _I64.as_pointer()), align=8)


def _emit_ahead(builder: Builder, places: Value, token: Value, count: int, token_bytes: int) -> None:
    """Prefetches the tokens [token, token + count) of `places`, in the order of their addresses."""
    for i in range(count):
        later = _place_of(builder, _after(builder, places, i * 8), token)
        for line in range(0, token_bytes, LINE_BYTES):
            emit_prefetch(builder, _after(builder, later, line))


def _emit_inputs(builder: Builder, words: Value, kind: int, row_kind: int) -> list[Value]:
    """Returns the inputs of scores that are stored in words: float32, or pairs of bfloat16 if rows have them."""
    if kind == FLOAT32:
        return [builder.bitcast(words, shaped(_F32, LANES))]
    if kind == BFLOAT16:
        return list(emit_widen_pairs(builder, words)) if row_kind == FLOAT32 else [words]
    numbers = (words, builder.lshr(words, constant(_I32, 16, LANES)))
    halves = (builder.trunc(number, shaped(_I16, LANES)) for number in numbers)
    return [emit_widen(builder, builder.bitcast(half, shaped(ir.HalfType(), LANES)), kind) for half in halves]


def _emit_columns(
    builder: Builder, dim: int, kind: int, row_kind: int, places: Value, tokens: list[Value], index: Value
) -> list[Value]:
    """Loads the words of _words_at_once numbered `index` of LANES keys; returns a vector of all keys for each input.

    row_kind: the format of the rows that they are multiplied with.
    Also prefetches as much of the tokens `tokens_ahead` further.
    """
    width = _words_at_once(dim, kind)
    count = -(-LANES * width // _num_words(dim, kind))
    ahead = _after(builder, places, tokens_ahead(dim, kind) * 8)
    first = builder.mul(index, ir.Constant(_I64, count))
    _emit_ahead(builder, ahead, first, count, dim * storage_bytes(kind))
    loaded = [emit_load_pairs(builder, _at(builder, token, index, width * 4), width) for token in tokens]
    words = _transposed(builder, [_joined(builder, loaded[i::width]) for i in range(width)])
    return [column for word in words for column in _emit_inputs(builder, word, kind, row_kind)]


def _emit_value(builder: Builder, kind: int, tokens: list[Value], offset: int, lanes: int) -> Value:
    """Loads numbers of the values of a step: as float32, or two values as pairs."""
    places = [_after(builder, token, offset) for token in tokens]
    if len(places) == 1:
        return emit_load(builder, places[0], kind, lanes)
    wide, pointer = shaped(_I32, lanes), shaped(_I16, lanes).as_pointer()
    first, second = (builder.zext(builder.load(builder.inttoptr(place, pointer), align=2), wide) for place in places)
    return builder.or_(first, builder.shl(second, ir.Constant(wide, [ir.Constant(_I32, 16)] * lanes)))


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
def pack_keys(typingctx: Any, head_dim: Any, storage: Any, places: Any, panel: Any) -> Any:
    """Copies the LANES keys at the addresses places[LANES] into one column of vectors of panel[inputs, PANEL].

    head_dim and storage are literals. Also prefetches the tokens `tokens_ahead` further in `places`.
    """
    dim, kind = head_dim.literal_value, storage.literal_value
    num_steps = _num_words(dim, kind) // _words_at_once(dim, kind)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        places, panel = arguments[2:]
        tokens = [_place_of(builder, places, token) for token in range(LANES)]
        with codegen.for_range(builder, ir.Constant(_I64, num_steps)) as loop:
            columns = _emit_columns(builder, dim, kind, row_format(kind, kind, dim), places, tokens, loop.index)
            target = _at(builder, panel, loop.index, len(columns) * PANEL * 4)
            for i, column in enumerate(columns):
                place = _after(builder, target, i * PANEL * 4)
                builder.store(column, builder.inttoptr(place, column.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(head_dim, storage, types.int64, types.int64), generate


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
    num_steps, num_inputs = _num_words(dim, kind) // _words_at_once(dim, kind), dim // inputs_at_once(own_kind)
    num_blocks = dim // BLOCK if row_kind == MATRIX else 1
    block_steps = num_steps // num_blocks
    held_at = [(group, row) for group in range(num_groups) for row in range(count)]

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, places, num_tokens, scores = arguments[3:]
        num_turns = builder.udiv(num_tokens, ir.Constant(_I64, LANES * num_groups))
        with codegen.for_range(builder, num_turns) as turn:
            first = _at(builder, places, turn.index, LANES * num_groups * 8)
            groups = [_after(builder, first, group * LANES * 8) for group in range(num_groups)]
            tokens = [[_place_of(builder, group, token) for token in range(LANES)] for group in groups]
            held = {at: _Sum(builder, row_kind) for at in held_at}
            with codegen.for_range(builder, ir.Constant(_I64, num_blocks)) as block:
                with codegen.for_range(builder, ir.Constant(_I64, block_steps)) as loop:
                    step = _at(builder, loop.index, block.index, block_steps)
                    for group in range(num_groups):
                        columns = _emit_columns(builder, dim, kind, own_kind, groups[group], tokens[group], step)
                        numbers = _at(builder, rows, step, len(columns) * 4)
                        for i, column in enumerate(columns):
                            for row in range(count):
                                place = _after(builder, numbers, (row * num_inputs + i) * 4)
                                held[group, row].add(i, emit_numbers(builder, place, own_kind, 1)[0], column)
                for total in held.values():
                    total.end_block()
            target = _at(builder, scores, turn.index, LANES * num_groups * 4)
            for (group, row), total in held.items():
                place = _after(builder, target, row * SCORE_STRIDE * 4 + group * LANES * 4)
                emit_store(builder, total.load(), place, FLOAT32)
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
                    own = _at(builder, places, step, width * 8)
                    tokens = [_place_of(builder, own, token) for token in range(width)]
                    if first == 0:
                        ahead = ir.Constant(_I64, tokens_ahead(dim, kind))
                        _emit_ahead(builder, own, ahead, width, dim * number_bytes)
                    for i in range(num_inputs):
                        taken = tokens[i * width // num_inputs : (i + 1) * width // num_inputs]
                        places_of = [_after(builder, _at(builder, row, step, num_inputs * 4), i * 4) for row in rows]
                        numbers = [emit_numbers(builder, place, own_kind, 1)[0] for place in places_of]
                        for part in parts:
                            value = _emit_value(builder, kind, taken, part * LANES * number_bytes, LANES)
                            for row in range(count):
                                held[row, part].add(i, numbers[row], value)
                for part in parts:
                    for row in range(count):
                        held[row, part].end_block()
        for (row, part), total in held.items():
            place = _after(builder, sums, (row * padded_size(dim) + part * LANES) * 4)
            emit_store(builder, total.load(), place, FLOAT32)
        return context.get_dummy_value()

    return types.none(head_dim, storage, num_rows, *[types.int64] * 5), generate


@instruction
def pack_values(typingctx: Any, head_dim: Any, storage: Any, places: Any, num_tokens: Any, panels: Any) -> Any:
    """Copies the values at the addresses places[num_tokens] into panels[padded_size / PANEL, inputs, PANEL].

    head_dim and storage are literals; num_tokens is even. Also prefetches the tokens `tokens_ahead` further.
    """
    dim, kind = head_dim.literal_value, storage.literal_value
    row_kind, lanes = row_format(kind, kind, dim), gcd(LANES, dim)
    width, span = inputs_at_once(row_kind), _SPANS[row_kind]

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        places, num_tokens, panels = arguments[2:]
        num_steps = builder.udiv(num_tokens, ir.Constant(_I64, width))
        with codegen.for_range(builder, num_steps) as loop:
            own = _at(builder, places, loop.index, width * 8)
            tokens = [_place_of(builder, own, token) for token in range(width)]
            ahead = ir.Constant(_I64, tokens_ahead(dim, kind))
            _emit_ahead(builder, own, ahead, width, dim * storage_bytes(kind))
            target = _at(builder, panels, loop.index, PANEL * 4)
            for start in range(0, dim, lanes):
                strip, column = divmod(start, PANEL)
                value = _emit_value(builder, kind, tokens, start * storage_bytes(kind), lanes)
                place = _after(builder, target, (strip * PANEL * span // width + column) * 4)
                builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(head_dim, storage, *[types.int64] * 3), generate


# Polynomials for 2 ** f on [-0.5, 0.5] (see native): relative errors of 1e-7, and of 3e-6, a thousandth of bfloat16's.
_POWERS = {
    FLOAT32: (1.0, 0.6931469, 0.24022238, 0.05550893, 0.009671698, 0.0013218672),
    BFLOAT16: (1.0, 0.69312197, 0.24023719, 0.055916894, 0.009600395),
}


def _emit_weights(builder: Builder, x: Value, kind: int) -> Value:
    """Computes 2 ** x of float32 for x up to 0, as precisely as weights of this kind need; 2 ** -126 for lesser x.

    `emit_exp2` takes half as long again, because it handles all x.
    """
    lanes = lanes_of(x)
    bottom = constant(_F32, -126.0, lanes)
    x = builder.select(builder.fcmp_ordered("<", x, bottom), bottom, x)
    whole = call_llvm(builder, "llvm.rint", x)
    fraction = builder.fsub(x, whole)
    power = constant(_F32, _POWERS[kind][-1], lanes)
    for coefficient in reversed(_POWERS[kind][:-1]):
        power = call_llvm(builder, "llvm.fmuladd", power, fraction, constant(_F32, coefficient, lanes))
    exponent = builder.shl(builder.fptosi(whole, shaped(_I32, lanes)), constant(_I32, 23, lanes))
    return builder.bitcast(builder.add(builder.bitcast(power, shaped(_I32, lanes)), exponent), x.type)


@instruction
def soften_row(
    typingctx: Any, storage: Any, scores: Any, begin: Any, start: Any, stop: Any, end: Any, scale: Any
) -> Any:
    """Computes a softmax without its division: the scores become 2 ** (scale * score - greatest).

    begin and end are multiples of SCORE_LANES. The row sees the scores [start, stop) of [begin, end); start is not
    before begin::

        begin ── 0 ── start ── 2 ** (scale * score - greatest) ── stop ── 0 ── end

    Returns (greatest, sum); a row that sees nothing gets (-inf, 0). NaN among the scores makes the sum NaN. With the
    literal storage BFLOAT16, the results, not their sum, are rounded and stored without gaps from the first score on.
    """
    kind = storage.literal_value

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        scores, begin, start, stop, end, scale = arguments[1:]
        lanes, step, mask = SCORE_LANES, ir.Constant(_I64, SCORE_LANES), ir.Constant(_I64, -SCORE_LANES)
        lowest, zero = constant(_F32, -math.inf, lanes), constant(_F32, 0.0, lanes)
        lane_ids = ir.Constant(ir.VectorType(_I32, lanes), [ir.Constant(_I32, lane) for lane in range(lanes)])
        starts, stops = (emit_splat(builder, builder.trunc(edge, _I32), lanes) for edge in (start, stop))
        scales = emit_splat(builder, scale, lanes)

        def at_most(a: Value, b: Value) -> Value:
            return builder.select(builder.icmp_signed("<", a, b), a, b)

        # Every score of [whole_from, whole_to) is seen.
        whole_from = at_most(end, builder.and_(builder.add(start, ir.Constant(_I64, lanes - 1)), mask))
        whole_to = builder.and_(at_most(stop, end), mask)
        whole_to = builder.select(builder.icmp_signed(">", whole_from, whole_to), whole_from, whole_to)

        def each(emit: Callable[[Value, Callable[[Value, Value], Value]], None]) -> None:
            """Emits loops over the scores: emit(index of the vector, function that replaces what is not seen)."""
            ranges = (begin, whole_from, False), (whole_from, whole_to, True), (whole_to, end, False)
            for first, last, is_whole in ranges:
                with codegen.for_range_slice(builder, first, last, step, inc=True) as (index, _):

                    def seen(value: Value, other: Value, index: Value = index, is_whole: bool = is_whole) -> Value:
                        if is_whole:
                            return value
                        ids = builder.add(emit_splat(builder, builder.trunc(index, _I32), lanes), lane_ids)
                        after = builder.icmp_signed(">=", ids, starts)
                        return builder.select(builder.and_(after, builder.icmp_signed("<", ids, stops)), value, other)

                    emit(index, seen)

        greatest = codegen.alloca_once_value(builder, lowest)
        builder.store(lowest, greatest)

        def compare(index: Value, seen: Callable[[Value, Value], Value]) -> None:
            score = seen(emit_load(builder, _at(builder, scores, index, 4), FLOAT32, lanes), lowest)
            held = builder.load(greatest)
            builder.store(builder.select(builder.fcmp_ordered(">", score, held), score, held), greatest)

        each(compare)
        top = builder.load(greatest)
        while top.type.count > 1:
            lower, upper = _halves(builder, top)
            top = builder.select(builder.fcmp_ordered(">", lower, upper), lower, upper)
        top = builder.extract_element(top, ir.Constant(_I32, 0))
        nothing = builder.fcmp_ordered("==", top, ir.Constant(_F32, -math.inf))
        base = builder.select(nothing, ir.Constant(_F32, 0.0), builder.fmul(top, scale))
        offsets = emit_splat(builder, builder.fneg(base), lanes)

        total = codegen.alloca_once_value(builder, zero)
        builder.store(zero, total)

        def weigh(index: Value, seen: Callable[[Value, Value], Value]) -> None:
            score = emit_load(builder, _at(builder, scores, index, 4), FLOAT32, lanes)
            power = call_llvm(builder, "llvm.fmuladd", score, scales, offsets)
            weight = seen(_emit_weights(builder, power, kind), zero)
            builder.store(builder.fadd(builder.load(total), weight), total)
            if kind == FLOAT32:
                emit_store(builder, weight, _at(builder, scores, index, 4), FLOAT32)
            else:
                packed = emit_round_pairs(builder, *_halves(builder, weight))
                pointer = builder.inttoptr(_at(builder, scores, index, 2), packed.type.as_pointer())
                builder.store(packed, pointer, align=2)

        each(weigh)
        whole = builder.load(total)
        while whole.type.count > 1:
            whole = builder.fadd(*_halves(builder, whole))
        whole = builder.extract_element(whole, ir.Constant(_I32, 0))
        base = builder.select(nothing, top, base)
        return context.make_tuple(builder, signature.return_type, [base, whole])

    pair = types.UniTuple(types.float32, 2)
    return pair(storage, *[types.int64] * 5, types.float32), generate


@inlined
def _first_row(token: int, to_first: int, group: int, most_rows: int) -> int:
    """Returns the first row of a tile such that no row before it sees the token or a later one.

    Rows 0 to group - 1 see up to to_first; tiles have most_rows rows.
    """
    return max(0, token - to_first) * group // most_rows * most_rows if token > 0 else 0


@inlined
def _widen(rows: int, row_bytes: int, num_rows: int, count: int, target: int) -> None:
    """Widens `count` bfloat16 of each of the rows to target[num_rows, count] float32."""
    for row in range(num_rows):
        for i in range(count):
            write(FLOAT32, target, row * count + i, read(BFLOAT16, rows + row * row_bytes, i))


_variants: list[Any] = []  # own the machine code


@cache
def tiles_kernel(head_dim: int, storage: int) -> tuple[int, int]:
    """Returns the addresses of `score` and `weigh` as C functions for one head_dim and one storage.

    score(rows, num_rows, places, num_tokens, scores, panels, to_first, group) computes scores[num_rows, SCORE_STRIDE]
    float32 of rows[num_rows, head_dim] with the keys at places[num_tokens]. weigh(scores, num_rows, places, num_tokens,
    sums, panels, to_first, group) computes sums[num_rows, padded_size] float32 of the values at places[num_tokens] with
    the softened scores. num_tokens is a multiple of SCORE_LANES; scores beyond it are overwritten too, up to a multiple
    of PANEL. Row r sees the tokens up to to_first + r // group; the scores of others may be left as they were. panels
    is scratch memory, padded_size * panel_words words.
    """
    if head_dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4, not {head_dim}")
    signature = types.void(*[types.int64] * 8)
    sources = SOURCES
    kind = row_format(storage, storage, head_dim)
    number_bytes, width, most_rows = storage_bytes(kind), inputs_at_once(kind), tile_rows(kind)
    span = _SPANS[kind]
    panel_kind = FLOAT32 if kind == FLOAT32 else BFLOAT16
    # Matrix registers multiply more than four rows so fast that a panel in memory pays.
    few_rows = 4 if kind == MATRIX else _FEW_ROWS
    row_bytes, score_bytes, sum_bytes = head_dim * number_bytes, SCORE_STRIDE * 4, padded_size(head_dim) * 4
    num_panels, panel_bytes = padded_size(head_dim) // PANEL, PANEL * span // width * 4
    num_inputs = head_dim // width

    is_whole = head_dim % LANES == 0

    def score(
        rows: int, num_rows: int, places: int, num_tokens: int, scores: int, panel: int, to_first: int, group: int
    ) -> None:
        _ = sources
        if is_whole and num_rows <= few_rows:
            if kind == MATRIX:
                _widen(rows, row_bytes, num_rows, head_dim, panel)
                rows = panel
            count_denormals(kind, True)
            if num_rows == 1:
                score_few(head_dim, storage, 1, rows, places, num_tokens, scores)
            elif num_rows == 2:
                score_few(head_dim, storage, 2, rows, places, num_tokens, scores)
            elif num_rows <= 4:
                score_few(head_dim, storage, 4, rows, places, num_tokens, scores)
            else:
                score_few(head_dim, storage, 8, rows, places, num_tokens, scores)
            count_denormals(kind, False)
            return
        full_rows = min(most_rows, num_rows)
        begin_products(kind, full_rows)
        for first in range(0, num_tokens, PANEL):
            for token in range(0, min(PANEL, num_tokens - first), LANES):
                pack_keys(head_dim, storage, places + (first + token) * 8, panel + token * 4)
            for row in range(_first_row(first, to_first, group, most_rows), num_rows, most_rows):
                count, target = min(full_rows, num_rows - row), scores + row * score_bytes + first * 4
                own = rows + row * row_bytes
                multiply(
                    count, full_rows, kind, panel_kind, 0, own, row_bytes, panel, num_inputs, target, score_bytes, None
                )
        end_products(kind)

    def weigh(
        scores: int, num_rows: int, places: int, num_tokens: int, sums: int, panels: int, to_first: int, group: int
    ) -> None:
        _ = sources
        if is_whole and num_rows <= few_rows:
            own_bytes = score_bytes
            if kind == MATRIX:
                own_bytes = num_tokens * 4
                _widen(scores, score_bytes, num_rows, num_tokens, panels)
                scores = panels
            count_denormals(kind, True)
            row = 0
            while row < num_rows:
                own, target = scores + row * own_bytes, sums + row * sum_bytes
                if num_rows - row >= 4:
                    weigh_few(head_dim, storage, 4, own, own_bytes, places, num_tokens, target)
                    row += 4
                elif num_rows - row >= 2:
                    weigh_few(head_dim, storage, 2, own, own_bytes, places, num_tokens, target)
                    row += 2
                else:
                    weigh_few(head_dim, storage, 1, own, own_bytes, places, num_tokens, target)
                    row += 1
            count_denormals(kind, False)
            return
        full_rows = min(most_rows, num_rows)
        begin_products(kind, full_rows)
        for first in range(0, num_tokens, span):
            taken = min(span, num_tokens - first)
            steps = taken // width
            pack_values(head_dim, storage, places + first * 8, taken, panels)
            for i in range(num_panels):
                panel = panels + i * panel_bytes
                for row in range(_first_row(first, to_first, group, most_rows), num_rows, most_rows):
                    count, target = min(full_rows, num_rows - row), sums + row * sum_bytes + i * PANEL * 4
                    own = scores + row * score_bytes + first * number_bytes
                    if first == 0:
                        multiply(
                            count, full_rows, kind, panel_kind, 0,
                            own, score_bytes, panel, steps, target, sum_bytes, None,
                        )  # fmt: skip
                    else:
                        multiply(
                            count, full_rows, kind, panel_kind, 1,
                            own, score_bytes, panel, steps, target, sum_bytes, None,
                        )  # fmt: skip
        end_products(kind)

    pair = compiled(score, signature), compiled(weigh, signature)
    _variants.extend(pair)
    return pair[0].address, pair[1].address
