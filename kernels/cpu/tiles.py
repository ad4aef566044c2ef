"""The products and the softmax of attention, for a chunk of tokens and a tile of rows.

A *row* is one query of one head; a *token* is one key or value of one kv head. Keys and values are copied into panels,
which `kernels.cpu.panels` multiplies as it does the weights of a linear layer; all rows of a tile share the copy. Then
the rows are scored, softened and weighed, HELD_ROWS at a time, so that their scores stay in a near cache::

    pack     all keys and values of the chunk
    score    scores[row, token]  = rows[row] · keys[token]                    a panel of keys: its outputs are tokens
    soften   scores[row, token]  = 2 ** (scale * scores[row, token] - greatest)
    weigh    sums[row, :]        = Σ scores[row, token] * values[token]       panels of values: their inputs are tokens

A product keeps up to `tile_rows` rows × PANEL sums in registers. A few rows, as in decode, multiply keys and values in
registers, without a panel in memory (`kernels.cpu.few_rows`). If the processor multiplies bfloat16 faster than float32,
rows, keys and values of that dtype stay as they are, in pairs of inputs, and the weights of the values are rounded to
it; otherwise everything is float32.

Every score is one running sum over the head, and every weighted sum one over the tokens from the start of the chunk. In
matrix registers a sum adds blocks of inputs, and a few rows, which vectors multiply, add in the same order (see
`kernels.cpu.amx`). So the bits of a row do not depend on the rows computed with it, nor on where its prompt was cut. No
instruction has a fast-math flag.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.amx import MATRIX, begin_products, count_denormals, end_products
from kernels.cpu.compiler import compiled, inlined, types
from kernels.cpu.few_rows import FEW_ROWS, score_few, weigh_few
from kernels.cpu.native import BFLOAT16, FLOAT32, Builder, Value, codegen, instruction, read, storage_bytes, write
from kernels.cpu.panels import LANES, PANEL, inputs_at_once, multiply, row_format, tile_rows
from kernels.cpu.softmax import CHUNK, SCORE_LANES, SCORE_STRIDE
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

# The tokens of a chunk that are computed begin at a multiple of this, and are a multiple of SCORE_LANES.
STRIP = max(PANEL, SCORE_LANES)

# The most query rows of a tile of a prompt, by their format: enough that copying keys and values costs little.
TILE_ROWS = {FLOAT32: 192, BFLOAT16: 192, MATRIX: 384}

# The rows whose scores are held at once, a multiple of `tile_rows`: few, because they share a cache with the panels,
# but enough to make good use of a span of a panel.
HELD_ROWS = {FLOAT32: 48, BFLOAT16: 48, MATRIX: 32}

# Tokens that the weighted sums take at once: so much of a panel stays in a first-level cache while all rows multiply
# it. Matrix registers are slow to load with sums.
_SPANS = {FLOAT32: 64, BFLOAT16: 64, MATRIX: CHUNK}

_I64 = ir.IntType(64)


def panel_words(row_kind: int) -> int:
    """Returns the words of scratch memory for panels, for each number of `padded_size`. A word is 4 bytes."""
    return 2 * CHUNK // inputs_at_once(row_kind)


def few_rows(head_dim: int, storage: int) -> int:
    """Returns up to how many rows are multiplied without panels."""
    if head_dim % LANES:
        return 0
    # Matrix registers multiply more than four rows so fast that a panel in memory pays.
    return 4 if row_format(storage, storage, head_dim) == MATRIX else FEW_ROWS


@instruction
def pack_keys(typingctx: Any, head_dim: Any, storage: Any, places: Any, panel: Any) -> Any:
    """Copies the LANES keys at the addresses places[LANES] into one column of vectors of panel[inputs, PANEL].

    head_dim and storage are literals. Also prefetches the tokens `tokens_ahead` further in `places`.
    """
    dim, kind = head_dim.literal_value, storage.literal_value
    num_steps = num_words(dim, kind) // words_at_once(dim, kind)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        places, panel = arguments[2:]
        tokens = [place_of(builder, places, token) for token in range(LANES)]
        with codegen.for_range(builder, ir.Constant(_I64, num_steps)) as loop:
            columns = emit_columns(builder, dim, kind, row_format(kind, kind, dim), places, tokens, loop.index)
            target = at_index(builder, panel, loop.index, len(columns) * PANEL * 4)
            for i, column in enumerate(columns):
                place = after(builder, target, i * PANEL * 4)
                builder.store(column, builder.inttoptr(place, column.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(head_dim, storage, types.int64, types.int64), generate


@instruction
def pack_values(typingctx: Any, head_dim: Any, storage: Any, places: Any, num_tokens: Any, panels: Any) -> Any:
    """Copies the values at the addresses places[num_tokens] into panels[padded_size / PANEL, CHUNK, PANEL].

    head_dim and storage are literals; num_tokens is even, and at most CHUNK. Also prefetches the tokens `tokens_ahead`
    further.
    """
    dim, kind = head_dim.literal_value, storage.literal_value
    row_kind, lanes = row_format(kind, kind, dim), gcd(LANES, dim)
    width = inputs_at_once(row_kind)

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        places, num_tokens, panels = arguments[2:]
        num_steps = builder.udiv(num_tokens, ir.Constant(_I64, width))
        with codegen.for_range(builder, num_steps) as loop:
            own = at_index(builder, places, loop.index, width * 8)
            tokens = [place_of(builder, own, token) for token in range(width)]
            ahead = ir.Constant(_I64, tokens_ahead(dim, kind))
            emit_ahead(builder, own, ahead, width, dim * storage_bytes(kind))
            target = at_index(builder, panels, loop.index, PANEL * 4)
            for start in range(0, dim, lanes):
                strip, column = divmod(start, PANEL)
                value = emit_value(builder, kind, tokens, start * storage_bytes(kind), lanes)
                place = after(builder, target, (strip * PANEL * CHUNK // width + column) * 4)
                builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(head_dim, storage, *[types.int64] * 3), generate


@inlined
def _first_row(token: int, offset: int, group: int, most_rows: int) -> int:
    """Returns the first row of a tile such that no row before it sees the token or a later one.

    Row r sees the tokens up to (offset + r) // group; tiles have most_rows rows.
    """
    return max(0, token * group - offset) // most_rows * most_rows if token > 0 else 0


@inlined
def _widen(rows: int, row_bytes: int, num_rows: int, count: int, target: int) -> None:
    """Widens `count` bfloat16 of each of the rows to target[num_rows, count] float32."""
    for row in range(num_rows):
        for i in range(count):
            write(FLOAT32, target, row * count + i, read(BFLOAT16, rows + row * row_bytes, i))


_variants: list[Any] = []  # own the machine code


@cache
def tiles_kernel(head_dim: int, storage: int) -> tuple[int, int, int]:
    """Returns the addresses of `pack`, `score` and `weigh` as C functions for one head_dim and one storage.

    pack(places, num_tokens, panels) copies the keys at places[num_tokens], and the values at the next num_tokens
    places, into panels. panels is scratch memory, padded_size * panel_words words.

    score(rows, num_rows, places, num_tokens, scores, panels, offset, group) computes scores[num_rows, SCORE_STRIDE]
    float32 of rows[num_rows, head_dim] with the keys in panels, or with those at `places` if that is not 0: `few_rows`
    at most, which may overwrite panels. weigh(scores, num_rows, places, num_tokens, sums, panels, offset, group)
    computes sums[num_rows, padded_size] float32 of the values with the softened scores; its places are those of values.
    It follows `score` of the same rows in the same thread. num_tokens is a multiple of SCORE_LANES; scores beyond it
    are overwritten too, up to a multiple of PANEL. Row r sees the tokens up to (offset + r) // group; the scores of
    others may be left as they were.
    """
    if head_dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4, not {head_dim}")
    kind = row_format(storage, storage, head_dim)
    number_bytes, width, most_rows = storage_bytes(kind), inputs_at_once(kind), tile_rows(kind)
    span = _SPANS[kind]
    panel_kind = FLOAT32 if kind == FLOAT32 else BFLOAT16
    row_bytes, score_bytes, sum_bytes = head_dim * number_bytes, SCORE_STRIDE * 4, padded_size(head_dim) * 4
    num_panels, panel_bytes = padded_size(head_dim) // PANEL, PANEL * CHUNK * number_bytes
    num_inputs, key_bytes = head_dim // width, head_dim * number_bytes
    to_values = CHUNK * key_bytes

    has_few = few_rows(head_dim, storage) > 0

    def pack(places: int, num_tokens: int, panels: int) -> None:
        for first in range(0, num_tokens, PANEL):
            panel = panels + first * key_bytes
            for token in range(0, min(PANEL, num_tokens - first), LANES):
                pack_keys(head_dim, storage, places + (first + token) * 8, panel + token * 4)
        pack_values(head_dim, storage, places + num_tokens * 8, num_tokens, panels + to_values)

    def score(
        rows: int, num_rows: int, places: int, num_tokens: int, scores: int, panels: int, offset: int, group: int
    ) -> None:
        if has_few and places != 0:
            if kind == MATRIX:
                _widen(rows, row_bytes, num_rows, head_dim, panels)
                rows = panels
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
            panel = panels + first * key_bytes
            for row in range(_first_row(first, offset, group, most_rows), num_rows, most_rows):
                count, target = min(full_rows, num_rows - row), scores + row * score_bytes + first * 4
                own = rows + row * row_bytes
                multiply(
                    count, full_rows, kind, panel_kind, 0, own, row_bytes, panel, num_inputs, target, score_bytes, None
                )

    def weigh(
        scores: int, num_rows: int, places: int, num_tokens: int, sums: int, panels: int, offset: int, group: int
    ) -> None:
        if has_few and places != 0:
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
        for first in range(0, num_tokens, span):
            steps = min(span, num_tokens - first) // width
            for i in range(num_panels):
                panel = panels + to_values + i * panel_bytes + first * PANEL * number_bytes
                for row in range(_first_row(first, offset, group, most_rows), num_rows, most_rows):
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

    eight = types.void(*[types.int64] * 8)
    own = compiled(pack, types.void(*[types.int64] * 3)), compiled(score, eight), compiled(weigh, eight)
    _variants.extend(own)
    return own[0].address, own[1].address, own[2].address
