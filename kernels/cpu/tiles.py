"""The vectorized inner loops of attention, written as LLVM instructions.

A *row* is one query of one head; a *token* is one key or value of one kv head. Rows are float32 in scratch memory,
tokens are stored numbers of the KV pool, one token after the other::

    score_rows   scores[row, token]  = rows[row] · keys[token]              tiles of 4 rows × 4 tokens
    weigh_rows   sums[row, :]       += scores[row, token] * values[token]   tiles of 4 rows × a strip of the head
    soften_row   scores[row, token]  = 2 ** (scores[row, token] - max)

The arithmetic of a result never depends on the tile it falls into: a dot product is `lanes` running sums over the
head, added up in a fixed tree; a weighted sum runs over the tokens in order. So the bits of a row do not depend on the
rows computed with it, nor on where its prompt was cut. No instruction has a fast-math flag.

A few rows are done with a token before memory delivers the next one. Both products therefore prefetch, tile by tile:
`ahead` is the address of as many tokens that are read later, or 0. Spread out, the prefetches complete during the
computation; issued all at once, they would stall the thread.
"""

from __future__ import annotations

import math
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any

from llvmlite import binding, ir  # type: ignore[import-untyped]

from kernels.cpu.compiler import SOURCES, compiled, types
from kernels.cpu.native import (
    FLOAT32,
    LINE_BYTES,
    Builder,
    Value,
    call_llvm,
    codegen,
    constant,
    emit_exp2,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    instruction,
    shaped,
    storage_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Scores of one row that are held at once: a context is cut into chunks of this many tokens, at multiples of it.
CHUNK = 256

# The softmax of a row processes its scores in vectors of this size.
SCORE_LANES = 16

# AVX-512 has 32 vector registers of 16 numbers, other machines 16 or more of 8 or 4 (LLVM splits wider vectors).
_HAS_512_BITS = bool(binding.get_host_cpu_features().get("avx512f", False))
_LANES = 16 if _HAS_512_BITS else 8
_MAX_ROWS = 4 if _HAS_512_BITS else 2
_MAX_ACCUMULATORS = 16 if _HAS_512_BITS else 8

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def tile_columns(block_size: int) -> int:
    """Returns the number of tokens of one score tile: 4, or a divisor of a smaller block size."""
    return gcd(4, block_size)


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


def _four_sums(builder: Builder, vectors: list[Value]) -> Value:
    """Returns the sums of four vectors as a vector of four, always added in the same order.

    It adds neighbours first, within each group of four lanes, then the groups, the upper half to the lower half::

        a b c d → [a0+a1 a2+a3 b0+b1 b2+b3]… [c.. d..]… → [Σa₀₋₃ Σb₀₋₃ Σc₀₋₃ Σd₀₋₃]… → [Σa Σb Σc Σd]
    """
    lanes = vectors[0].type.count
    fours = range(0, lanes, 4)
    even = [lane for g in fours for lane in (g, g + 2, lanes + g, lanes + g + 2)]
    odd = [lane for g in fours for lane in (g + 1, g + 3, lanes + g + 1, lanes + g + 3)]

    def pairwise(a: Value, b: Value) -> Value:
        return builder.fadd(_shuffle(builder, a, b, even), _shuffle(builder, a, b, odd))

    total = pairwise(pairwise(vectors[0], vectors[1]), pairwise(vectors[2], vectors[3]))
    while total.type.count > 4:
        total = builder.fadd(*_halves(builder, total))
    return total


def _row_tiles(builder: Builder, num_rows: Value) -> Iterator[tuple[Value, int]]:
    """Loops over the rows in tiles, first of the largest size, then of half of it, and so on: (first row, size)."""
    start = ir.Constant(_I64, 0)
    size = _MAX_ROWS
    while size:
        stop = builder.and_(num_rows, ir.Constant(_I64, -size))
        with codegen.for_range_slice(builder, start, stop, ir.Constant(_I64, size), inc=True) as (first, _):
            yield first, size
        start = stop
        size //= 2


def _emit_ahead(builder: Builder, ahead: Value, token: Value, token_bytes: int, num_tokens: int) -> None:
    """Prefetches the tokens [token, token + num_tokens) from `ahead` on, unless `ahead` is 0."""
    with builder.if_then(builder.icmp_signed("!=", ahead, ir.Constant(_I64, 0))):
        place = _at(builder, ahead, token, token_bytes)
        for line in range(0, num_tokens * token_bytes, LINE_BYTES):
            emit_prefetch(builder, _after(builder, place, line))


def _emit_scores(
    builder: Builder,
    head_dim: int,
    storage: int,
    shape: tuple[int, int],
    rows: Value,
    keys: Value,
    scores: Value,
) -> None:
    """Emits one tile of dot products of shape (rows, tokens), all in registers during one pass over the head."""
    num_rows, columns = shape
    lanes, number_bytes = gcd(_LANES, head_dim), storage_bytes(storage)
    sums: dict[tuple[int, int], Value] = {}
    for start in range(0, head_dim, lanes):
        places = [_after(builder, rows, (row * head_dim + start) * 4) for row in range(num_rows)]
        queries = [emit_load(builder, place, FLOAT32, lanes) for place in places]
        for column in range(columns):
            place = _after(builder, keys, (column * head_dim + start) * number_bytes)
            key = emit_load(builder, place, storage, lanes)
            for row, query in enumerate(queries):
                at = (row, column)
                if start == 0:
                    sums[at] = builder.fmul(query, key)
                else:
                    sums[at] = call_llvm(builder, "llvm.fmuladd", query, key, sums[at])
    for row in range(num_rows):
        four = _four_sums(builder, [sums[row, column % columns] for column in range(4)])
        used = _shuffle(builder, four, four, list(range(columns)))
        emit_store(builder, used, _after(builder, scores, row * CHUNK * 4), FLOAT32)


@instruction
def score_rows(
    typingctx: Any,
    head_dim: Any,
    storage: Any,
    columns: Any,
    rows: Any,
    num_rows: Any,
    keys: Any,
    num_tokens: Any,
    scores: Any,
    ahead: Any,
) -> Any:
    """Computes scores[row, token] = rows[row] · keys[token]. num_tokens is a multiple of the literal `columns`.

    Takes the addresses of rows[num_rows, head_dim] float32, keys[num_tokens, head_dim] stored, and
    scores[num_rows, CHUNK] float32.
    """
    signature = types.none(head_dim, storage, columns, *[types.int64] * 6)
    dim, kind, width = (literal.literal_value for literal in (head_dim, storage, columns))

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        rows, num_rows, keys, num_tokens, scores, ahead = arguments[3:]
        token_bytes = dim * storage_bytes(kind)
        zero, step = ir.Constant(_I64, 0), ir.Constant(_I64, width)
        for row, size in _row_tiles(builder, num_rows):
            tile_rows = _at(builder, rows, row, dim * 4)
            tile_scores = _at(builder, scores, row, CHUNK * 4)
            with codegen.for_range_slice(builder, zero, num_tokens, step, inc=True) as (token, _):
                _emit_ahead(builder, ahead, token, token_bytes, width)
                tile_keys = _at(builder, keys, token, token_bytes)
                place = _at(builder, tile_scores, token, 4)
                _emit_scores(builder, dim, kind, (size, width), tile_rows, tile_keys, place)
        return context.get_dummy_value()

    return signature, generate


def _emit_strip(
    builder: Builder,
    head_dim: int,
    storage: int,
    shape: tuple[int, int],
    scores: Value,
    values: Value,
    sums: Value,
    ahead: Value | None,
) -> Any:
    """Returns emit(num_tokens), which emits the loop over all tokens for a strip of shape (rows, vectors of the head).

    ahead  see the module; None for all strips but the first
    """
    lanes, number_bytes = gcd(_LANES, head_dim), storage_bytes(storage)
    num_rows, num_parts = shape
    places = [(row, part) for row in range(num_rows) for part in range(num_parts)]
    addresses = {at: _after(builder, sums, (at[0] * head_dim + at[1] * lanes) * 4) for at in places}

    def emit(num_tokens: Value) -> None:
        held = {at: codegen.alloca_once(builder, shaped(_F32, lanes)) for at in places}
        for at in places:
            builder.store(emit_load(builder, addresses[at], FLOAT32, lanes), held[at])
        with codegen.for_range(builder, num_tokens) as loop:
            if ahead is not None:
                _emit_ahead(builder, ahead, loop.index, head_dim * number_bytes, 1)
            token = _at(builder, values, loop.index, head_dim * number_bytes)
            parts = [
                emit_load(builder, _after(builder, token, part * lanes * number_bytes), storage, lanes)
                for part in range(num_parts)
            ]
            for row in range(num_rows):
                place = _at(builder, _after(builder, scores, row * CHUNK * 4), loop.index, 4)
                weight = emit_splat(builder, emit_load(builder, place, FLOAT32, 1), lanes)
                for part, value in enumerate(parts):
                    total = held[row, part]
                    builder.store(call_llvm(builder, "llvm.fmuladd", weight, value, builder.load(total)), total)
        for at in places:
            emit_store(builder, builder.load(held[at]), addresses[at], FLOAT32)

    return emit


@instruction
def weigh_rows(
    typingctx: Any,
    head_dim: Any,
    storage: Any,
    scores: Any,
    num_rows: Any,
    values: Any,
    num_tokens: Any,
    sums: Any,
    ahead: Any,
) -> Any:
    """Computes sums[row, :] += scores[row, token] * values[token], token by token.

    Takes the addresses of scores[num_rows, CHUNK] float32, values[num_tokens, head_dim] stored, and
    sums[num_rows, head_dim] float32.
    """
    signature = types.none(head_dim, storage, *[types.int64] * 6)
    dim, kind = head_dim.literal_value, storage.literal_value
    lanes = gcd(_LANES, dim)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        scores, num_rows, values, num_tokens, sums, ahead = arguments[2:]
        for row, size in _row_tiles(builder, num_rows):
            tile_scores = _at(builder, scores, row, CHUNK * 4)
            tile_sums = _at(builder, sums, row, dim * 4)
            width = max(1, _MAX_ACCUMULATORS // size)
            for part in range(0, dim // lanes, width):
                shape = (size, min(width, dim // lanes - part))
                strip_values = _after(builder, values, part * lanes * storage_bytes(kind))
                strip_sums = _after(builder, tile_sums, part * lanes * 4)
                prefetched = ahead if part == 0 else None
                _emit_strip(builder, dim, kind, shape, tile_scores, strip_values, strip_sums, prefetched)(num_tokens)
        return context.get_dummy_value()

    return signature, generate


@instruction
def soften_row(typingctx: Any, scores: Any, begin: Any, start: Any, stop: Any, end: Any) -> Any:
    """Computes a softmax without its division: the scores become 2 ** (score - max). Returns (max, sum).

    begin and end are multiples of SCORE_LANES. The row sees the scores [start, stop) of [begin, end)::

        begin ── 0 ── start ── 2 ** (score - max) ── stop ── 0 ── end

    A row that sees nothing gets (-inf, 0). NaN among the scores makes the sum NaN.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        scores, begin, start, stop, end = arguments
        lanes, step = SCORE_LANES, ir.Constant(_I64, SCORE_LANES)
        lowest = constant(_F32, -math.inf, lanes)
        lane_ids = ir.Constant(ir.VectorType(_I64, lanes), [ir.Constant(_I64, lane) for lane in range(lanes)])
        starts, stops = emit_splat(builder, start, lanes), emit_splat(builder, stop, lanes)

        greatest = codegen.alloca_once(builder, lowest.type)
        builder.store(lowest, greatest)
        with codegen.for_range_slice(builder, begin, end, step, inc=True) as (index, _):
            place = _at(builder, scores, index, 4)
            ids = builder.add(emit_splat(builder, index, lanes), lane_ids)
            after = builder.icmp_signed(">=", ids, starts)
            seen = builder.and_(after, builder.icmp_signed("<", ids, stops))
            score = builder.select(seen, emit_load(builder, place, FLOAT32, lanes), lowest)
            emit_store(builder, score, place, FLOAT32)
            held = builder.load(greatest)
            builder.store(builder.select(builder.fcmp_ordered(">", score, held), score, held), greatest)

        top = builder.load(greatest)
        while top.type.count > 1:
            lower, upper = _halves(builder, top)
            top = builder.select(builder.fcmp_ordered(">", lower, upper), lower, upper)
        top = builder.extract_element(top, ir.Constant(_I32, 0))
        nothing = builder.fcmp_ordered("==", top, ir.Constant(_F32, -math.inf))
        base = emit_splat(builder, builder.select(nothing, ir.Constant(_F32, 0.0), top), lanes)

        total = codegen.alloca_once(builder, lowest.type)
        builder.store(constant(_F32, 0.0, lanes), total)
        with codegen.for_range_slice(builder, begin, end, step, inc=True) as (index, _):
            place = _at(builder, scores, index, 4)
            weight = emit_exp2(builder, builder.fsub(emit_load(builder, place, FLOAT32, lanes), base))
            emit_store(builder, weight, place, FLOAT32)
            builder.store(builder.fadd(builder.load(total), weight), total)

        whole = builder.load(total)
        while whole.type.count > 1:
            whole = builder.fadd(*_halves(builder, whole))
        whole = builder.extract_element(whole, ir.Constant(_I32, 0))
        return context.make_tuple(builder, signature.return_type, [top, whole])

    pair = types.UniTuple(types.float32, 2)
    return pair(*[types.int64] * 5), generate


_variants: list[Any] = []  # own the machine code


@cache
def tiles_kernel(head_dim: int, storage: int, columns: int) -> tuple[int, int]:
    """Returns the addresses of `score_rows` and `weigh_rows` as C functions for one head_dim and one storage."""
    if head_dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4, not {head_dim}")
    signature = types.void(*[types.int64] * 6)
    sources = SOURCES

    def score(rows: int, num_rows: int, keys: int, num_tokens: int, scores: int, ahead: int) -> None:
        _ = sources
        score_rows(head_dim, storage, columns, rows, num_rows, keys, num_tokens, scores, ahead)

    def weigh(scores: int, num_rows: int, values: int, num_tokens: int, sums: int, ahead: int) -> None:
        _ = sources
        weigh_rows(head_dim, storage, scores, num_rows, values, num_tokens, sums, ahead)

    pair = compiled(score, signature), compiled(weigh, signature)
    _variants.extend(pair)
    return pair[0].address, pair[1].address
