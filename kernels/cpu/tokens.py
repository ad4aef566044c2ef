"""Loads keys and values of tokens into vectors, and prefetches those of later tokens.

Few rows are done with a token before memory delivers the next one. Reading a token therefore prefetches a later one.
Spread out, the prefetches complete during the computation; issued all at once, they would stall the thread.
"""

from __future__ import annotations

from math import gcd

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.native import (
    BFLOAT16,
    FLOAT32,
    LINE_BYTES,
    Builder,
    Value,
    constant,
    emit_load,
    emit_load_pairs,
    emit_prefetch,
    emit_widen,
    emit_widen_pairs,
    shaped,
    storage_bytes,
)
from kernels.cpu.panels import LANES, PANEL

# Bytes that are prefetched ahead: a little more than memory delivers within its latency.
_BYTES_AHEAD = 8192
MAX_TOKENS_AHEAD = 64

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def padded_size(head_dim: int) -> int:
    """Returns head_dim, rounded up to whole panels: the numbers of a weighted sum."""
    return -(-head_dim // PANEL) * PANEL


def num_words(head_dim: int, storage: int) -> int:
    """Returns the number of words of a key. A word is 4 bytes: one number, or two of 16 bits."""
    return head_dim * storage_bytes(storage) // 4


def words_at_once(head_dim: int, storage: int) -> int:
    """Returns how many words of a key are transposed at once: 16 bytes, which vector shuffles move as a whole."""
    return gcd(4, num_words(head_dim, storage))


def tokens_ahead(head_dim: int, storage: int) -> int:
    """Returns how many tokens ahead to prefetch."""
    return min(MAX_TOKENS_AHEAD, max(LANES, _BYTES_AHEAD // (head_dim * storage_bytes(storage))))


def at_index(builder: Builder, base: Value, index: Value, num_bytes: int) -> Value:
    """Returns base + index * num_bytes."""
    return builder.add(base, builder.mul(index, ir.Constant(_I64, num_bytes)))


def after(builder: Builder, base: Value, num_bytes: int) -> Value:
    """Returns base + num_bytes."""
    return builder.add(base, ir.Constant(_I64, num_bytes))


def _shuffle(builder: Builder, a: Value, b: Value, lanes: list[int]) -> Value:
    """Returns a vector of the given lanes of a and b; the lanes of b are numbered after those of a."""
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


def halves_of(builder: Builder, vector: Value) -> tuple[Value, Value]:
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


def place_of(builder: Builder, places: Value, token: Value | int) -> Value:
    """Loads the address of a token."""
    at = after(builder, places, token * 8) if isinstance(token, int) else at_index(builder, places, token, 8)
    return builder.load(builder.inttoptr(at, _I64.as_pointer()), align=8)


def emit_ahead(builder: Builder, places: Value, token: Value, count: int, token_bytes: int) -> None:
    """Prefetches the tokens [token, token + count) of `places`, in the order of their addresses."""
    for i in range(count):
        later = place_of(builder, after(builder, places, i * 8), token)
        for line in range(0, token_bytes, LINE_BYTES):
            emit_prefetch(builder, after(builder, later, line))


def _emit_inputs(builder: Builder, words: Value, kind: int, row_kind: int) -> list[Value]:
    """Returns the inputs of scores that are stored in words: float32, or pairs of bfloat16 if rows have them."""
    if kind == FLOAT32:
        return [builder.bitcast(words, shaped(_F32, LANES))]
    if kind == BFLOAT16:
        return list(emit_widen_pairs(builder, words)) if row_kind == FLOAT32 else [words]
    numbers = (words, builder.lshr(words, constant(_I32, 16, LANES)))
    halves = (builder.trunc(number, shaped(_I16, LANES)) for number in numbers)
    return [emit_widen(builder, builder.bitcast(half, shaped(ir.HalfType(), LANES)), kind) for half in halves]


def emit_columns(
    builder: Builder, dim: int, kind: int, row_kind: int, places: Value, tokens: list[Value], index: Value
) -> list[Value]:
    """Loads the words of words_at_once numbered `index` of LANES keys; returns a vector of all keys for each input.

    row_kind: the format of the rows that they are multiplied with.
    Also prefetches as much of the tokens `tokens_ahead` further.
    """
    width = words_at_once(dim, kind)
    count = -(-LANES * width // num_words(dim, kind))
    ahead = after(builder, places, tokens_ahead(dim, kind) * 8)
    first = builder.mul(index, ir.Constant(_I64, count))
    emit_ahead(builder, ahead, first, count, dim * storage_bytes(kind))
    loaded = [emit_load_pairs(builder, at_index(builder, token, index, width * 4), width) for token in tokens]
    words = _transposed(builder, [_joined(builder, loaded[i::width]) for i in range(width)])
    return [column for word in words for column in _emit_inputs(builder, word, kind, row_kind)]


def emit_value(builder: Builder, kind: int, tokens: list[Value], offset: int, lanes: int) -> Value:
    """Loads numbers of the values of a step: as float32, or two values as pairs."""
    places = [after(builder, token, offset) for token in tokens]
    if len(places) == 1:
        return emit_load(builder, places[0], kind, lanes)
    wide, pointer = shaped(_I32, lanes), shaped(_I16, lanes).as_pointer()
    first, second = (builder.zext(builder.load(builder.inttoptr(place, pointer), align=2), wide) for place in places)
    return builder.or_(first, builder.shl(second, ir.Constant(wide, [ir.Constant(_I32, 16)] * lanes)))
