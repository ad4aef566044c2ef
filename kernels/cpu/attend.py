"""Attention that reads KV blocks in place; decode and prefill are one kernel.

The context of a sequence is cut into chunks at multiples of CHUNK tokens. For a tile of query rows each chunk gives a
part: per row the greatest score, the sum of 2 ** (score - greatest), and the sum of the values with these weights. The
parts of a row are merged from the first chunk to the last, and the weighted sum is divided by the sum of weights at the
end. This is online softmax (Milakov and Gimelshein, 2018) over blocks of keys as in FlashAttention (Dao et al., 2022).
The job's scale contains a factor of log2(e), so that powers of two suffice.

Work is divided into units. A unit belongs to one kv head and covers all query heads that read it::

    one query in the sequence     one unit per chunk; the last thread to finish merges the parts of a row, in order
    several queries               one unit per tile of queries, which processes all its chunks itself

The cuts depend only on positions: a row has the same bits in any batch, in any split of its prompt into steps, in
decode and in prefill.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.cpu.compiler import compiled, inlined
from kernels.cpu.native import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    HAS_BFLOAT16_ROUNDING,
    LINE_BYTES,
    array,
    call,
    count_up,
    exp2,
    prefetch,
    read,
    write,
)
from kernels.cpu.softmax import CHUNK, SCORE_LANES, SCORE_STRIDE, soften_row
from kernels.cpu.team import Kernel, job_dtype
from kernels.cpu.tiles import STRIP
from kernels.cpu.tokens import MAX_TOKENS_AHEAD, padded_size

# A short prompt of few kv heads is cut into smaller tiles, so that every thread gets some of these units.
_MIN_UNITS, _MIN_TILE_ROWS = 8, 48

# The storage of weights if `takes_pairs`. Where that is never so, no instruction for it may be compiled.
_PAIRED = BFLOAT16 if HAS_BFLOAT16_ROUNDING else FLOAT32


# Fields named after tensors hold their addresses. pack, score, weigh: the functions of `tiles_kernel`. takes_pairs: 1
# if products take bfloat16 as it is. tile_rows: the most query rows of a tile. held_rows, few_rows, panel_words: see
# `kernels.cpu.tiles`. padded_size, tokens_ahead: see `kernels.cpu.tokens`. group: query heads per kv head. table_width:
# entries from one row of the block tables to the next. table_rows: the row of each sequence, null if sequence s uses
# row s. query_starts: null if every sequence has one query. parts: float32 [sequence, kv head, chunk, part_numbers].
# arrivals: int64 [sequence, kv head], zero between calls.
ATTENTION_JOB = job_dtype(
    """pack score weigh takes_pairs tile_rows held_rows few_rows panel_words padded_size tokens_ahead query
    query_token_bytes query_head_bytes out out_token_bytes out_head_bytes kv kv_block_bytes storage number_bytes
    num_kv_heads group head_dim block_size block_tables table_width table_rows context_lens query_starts num_sequences
    window parts arrivals max_chunks""",
    "scale",
)


def part_numbers(group: int, head_dim: int) -> int:
    """Returns the size of a part of `group` rows, in float32."""
    return group * (padded_size(head_dim) + 2)


@inlined
def _queries(job: Any, s: int) -> tuple[int, int, int]:
    """Returns the first query row of sequence s, its number of query rows, and its context_len."""
    context_len = int(array(job.context_lens, job.num_sequences, np.int32)[s])
    if job.query_starts == 0:
        return s, 1, context_len
    starts = array(job.query_starts, job.num_sequences + 1, np.int32)
    return int(starts[s]), int(starts[s + 1]) - int(starts[s]), context_len


@inlined
def _first_seen(job: Any, position: int) -> int:
    """Returns the first position that a query at `position` sees."""
    return max(0, position + 1 - job.window) if job.window > 0 else 0


@inlined
def _chunks(job: Any, first_position: int, last_position: int) -> tuple[int, int]:
    """Returns the first chunk that queries at these positions see, and the number of chunks."""
    first = _first_seen(job, first_position) // CHUNK
    return first, last_position // CHUNK + 1 - first


@inlined
def _tile_queries(job: Any, num_queries: int) -> int:
    """Returns the number of queries of a tile: at most tile_rows rows of all heads of the group, or one query."""
    num_tiles = (_MIN_UNITS + job.num_kv_heads - 1) // job.num_kv_heads
    wanted = max((num_queries + num_tiles - 1) // num_tiles, _MIN_TILE_ROWS // job.group)
    return int(max(1, min(job.tile_rows // job.group, wanted)))


@inlined
def _num_units(job: Any, s: int) -> int:
    """Returns the number of units of sequence s, 0 after the last sequence."""
    if s >= job.num_sequences:
        return 0
    _, num_queries, context_len = _queries(job, s)
    if num_queries != 1:
        tile = _tile_queries(job, num_queries)
        num_units = (num_queries + tile - 1) // tile
    else:
        num_units = max(1, _chunks(job, context_len - 1, context_len - 1)[1])
    return num_units * int(job.num_kv_heads)


@inlined
def _load_rows(job: Any, first_query: int, kv_head: int, num_rows: int, rows: int) -> None:
    """Copies query rows in the format of the products; row r is head r % group, of query first_query + r // group.

    Only the sign of the scale is applied. The softmax applies the rest: its product with a bfloat16 is no bfloat16.
    """
    sign = np.float32(1 if job.scale >= 0 else -1)
    for row in range(num_rows):
        source = job.query + (first_query + row // job.group) * job.query_token_bytes
        source += (kv_head * job.group + row % job.group) * job.query_head_bytes
        if job.takes_pairs:
            target = rows + row * job.head_dim * 2
            for i in range(job.head_dim):
                write(BFLOAT16, target, i, read(BFLOAT16, source, i) * sign)
            continue
        target = rows + row * job.head_dim * 4
        for i in range(job.head_dim):
            if job.storage == FLOAT32:
                number = read(FLOAT32, source, i)
            elif job.storage == BFLOAT16:
                number = read(BFLOAT16, source, i)
            else:
                number = read(FLOAT16, source, i)
            write(FLOAT32, target, i, number * sign)


@inlined
def _part_arrays(part: int, num_rows: int) -> tuple[Any, Any]:
    """Returns the arrays of the part at an address: the greatest score and the sum of each row."""
    return array(part, num_rows, np.float32), array(part + num_rows * 4, num_rows, np.float32)


@inlined
def _sums(job: Any, part: int, num_rows: int, row: int) -> Any:
    """Returns the weighted values of a row of a part.

    Loops over such an array become vector instructions; those over an index that could be negative do not.
    """
    return array(part + (num_rows * 2 + row * job.padded_size) * 4, job.head_dim, np.float32)


@inlined
def _clear(job: Any, part: int, num_rows: int) -> None:
    """Resets a part to that of rows that have seen no token."""
    greatest, totals = _part_arrays(part, num_rows)
    for row in range(num_rows):
        greatest[row], totals[row] = -np.inf, 0
        _sums(job, part, num_rows, row)[:] = 0


@inlined
def _merge(job: Any, state: int, part: int, num_rows: int) -> None:
    """Merges a part into the state, which is the merged part of all chunks before."""
    state_greatest, state_totals = _part_arrays(state, num_rows)
    greatest, totals = _part_arrays(part, num_rows)
    for row in range(num_rows):
        if totals[row] == 0:
            continue
        top = max(state_greatest[row], greatest[row])
        kept, added = exp2(state_greatest[row] - top), exp2(greatest[row] - top)
        state_greatest[row] = top
        state_totals[row] = state_totals[row] * kept + totals[row] * added
        state_sums, sums = _sums(job, state, num_rows, row), _sums(job, part, num_rows, row)
        for i in range(job.head_dim):
            state_sums[i] = state_sums[i] * kept + sums[i] * added


@inlined
def _finish(job: Any, first_query: int, kv_head: int, num_rows: int, part: int) -> None:
    """Divides the weighted values of a part by the sums and stores the rows; a row that saw no token becomes zeros."""
    _, totals = _part_arrays(part, num_rows)
    for row in range(num_rows):
        target = job.out + (first_query + row // job.group) * job.out_token_bytes
        target += (kv_head * job.group + row % job.group) * job.out_head_bytes
        total = np.float32(1) if totals[row] == 0 else totals[row]
        sums = _sums(job, part, num_rows, row)
        if job.storage == FLOAT32:
            for i in range(job.head_dim):
                write(FLOAT32, target, i, sums[i] / total)
        elif job.storage == BFLOAT16:
            for i in range(job.head_dim):
                write(BFLOAT16, target, i, sums[i] / total)
        else:
            for i in range(job.head_dim):
                write(FLOAT16, target, i, sums[i] / total)


@inlined
def _place_tokens(job: Any, s: int, kv_head: int, first: int, start: int, stop: int, count: int, buffers: Any) -> None:
    """Sets places[2 * count] to the addresses of the keys of the tokens [first, first + count), then of the values.

    Tokens outside [start, stop) get the address of a token of zeros, which also follows the last value. Prefetches the
    first tokens.
    """
    _, _, places_at, _, zeros = buffers
    places = array(places_at, 2 * (count + MAX_TOKENS_AHEAD), np.int64)
    table_row = s if job.table_rows == 0 else int(array(job.table_rows, job.num_sequences, np.int32)[s])
    table = array(job.block_tables + table_row * job.table_width * 4, job.table_width, np.int32)
    token_bytes = job.head_dim * job.number_bytes
    to_values = job.num_kv_heads * job.block_size * token_bytes
    for i in range(start - first):
        places[i] = places[count + i] = zeros
    block = start // job.block_size
    token, offset = start, start - block * job.block_size
    while token < stop:
        key = job.kv + table[block] * job.kv_block_bytes + (kv_head * job.block_size + offset) * token_bytes
        for i in range(token - first, min(stop, token + job.block_size - offset) - first):
            places[i], places[count + i] = key, key + to_values
            key += token_bytes
        token, block, offset = token + job.block_size - offset, block + 1, 0
    for i in range(stop - first, count):
        places[i] = places[count + i] = zeros
    for i in range(2 * MAX_TOKENS_AHEAD):
        places[2 * count + i] = zeros
    for i in range(min(count, job.tokens_ahead)):
        for line in range(0, token_bytes, LINE_BYTES):
            prefetch(places[i] + line)


@inlined
def _attend_chunk(
    job: Any, s: int, kv_head: int, chunk: int, first_position: int, num_rows: int, buffers: Any, part: int
) -> None:
    """Computes the part of one chunk for the rows; the first rows are at first_position."""
    rows, scores, places, panels, _ = buffers
    greatest, totals = _part_arrays(part, num_rows)
    last_position = first_position + (num_rows - 1) // job.group
    start = max(chunk * CHUNK, _first_seen(job, first_position))
    stop = min((chunk + 1) * CHUNK, last_position + 1)
    first = start // STRIP * STRIP
    end = (stop - first + SCORE_LANES - 1) // SCORE_LANES * SCORE_LANES
    _place_tokens(job, s, kv_head, first, start, stop, end, buffers)
    keys = values = 0
    if num_rows <= job.few_rows:
        keys, values = places, places + end * 8
    else:
        call(job.pack, places, end, panels)
    scale = np.float32(abs(job.scale))
    row_bytes = job.head_dim * (2 if job.takes_pairs else 4)
    for held in range(0, num_rows, job.held_rows):
        count = min(job.held_rows, num_rows - held)
        offset = (first_position - first) * job.group + held
        call(job.score, rows + held * row_bytes, count, keys, end, scores, panels, offset, job.group)
        for row in range(held, held + count):
            position = first_position + row // job.group
            seen_from, seen_to = max(start, _first_seen(job, position)) - first, min(stop, position + 1) - first
            own = scores + (row - held) * SCORE_STRIDE * 4
            if job.takes_pairs:
                greatest[row], totals[row] = soften_row(_PAIRED, own, 0, seen_from, seen_to, end, scale)
            else:
                greatest[row], totals[row] = soften_row(FLOAT32, own, 0, seen_from, seen_to, end, scale)
        sums = part + num_rows * 8 + held * job.padded_size * 4
        call(job.weigh, scores, count, values, end, sums, panels, offset, job.group)


@inlined
def _attend_one(job: Any, s: int, kv_head: int, index: int, buffers: Any, part: int, state: int) -> None:
    """Processes the unit of a sequence with one query: chunk `index` of those the query sees."""
    query, _, context_len = _queries(job, s)
    num_rows, position = job.group, context_len - 1
    if context_len == 0:
        _clear(job, part, num_rows)
        _finish(job, query, kv_head, num_rows, part)
        return
    _load_rows(job, query, kv_head, num_rows, buffers[0])
    first_chunk, num_chunks = _chunks(job, position, position)
    if num_chunks == 1:
        _attend_chunk(job, s, kv_head, first_chunk, position, num_rows, buffers, part)
        _finish(job, query, kv_head, num_rows, part)
        return

    row_of_parts = s * job.num_kv_heads + kv_head
    part_bytes = num_rows * (job.padded_size + 2) * 4
    parts = job.parts + row_of_parts * job.max_chunks * part_bytes
    mine = parts + index * part_bytes
    _attend_chunk(job, s, kv_head, first_chunk + index, position, num_rows, buffers, mine)
    arrival = job.arrivals + row_of_parts * 8
    if count_up(arrival) == num_chunks - 1:
        array(arrival, 1, np.int64)[0] = 0
        _clear(job, state, num_rows)
        for i in range(num_chunks):
            _merge(job, state, parts + i * part_bytes, num_rows)
        _finish(job, query, kv_head, num_rows, state)


@inlined
def _attend_tile(job: Any, s: int, kv_head: int, index: int, buffers: Any, part: int, state: int) -> None:
    """Processes the unit of a tile of queries. The last tile of a prompt sees most tokens and has index 0."""
    first_query, num_queries, context_len = _queries(job, s)
    tile = _tile_queries(job, num_queries)
    skipped = ((num_queries + tile - 1) // tile - 1 - index) * tile
    num_rows = min(tile, num_queries - skipped) * job.group
    position = context_len - num_queries + skipped
    _load_rows(job, first_query + skipped, kv_head, num_rows, buffers[0])
    first_chunk, num_chunks = _chunks(job, position, position + num_rows // job.group - 1)
    if num_chunks == 1:
        _attend_chunk(job, s, kv_head, first_chunk, position, num_rows, buffers, part)
        _finish(job, first_query + skipped, kv_head, num_rows, part)
        return
    _clear(job, state, num_rows)
    for chunk in range(first_chunk, first_chunk + num_chunks):
        _attend_chunk(job, s, kv_head, chunk, position, num_rows, buffers, part)
        _merge(job, state, part, num_rows)
    _finish(job, first_query + skipped, kv_head, num_rows, state)


@cache
def attend_kernel() -> Kernel:
    """Returns the attention kernel, which serves every shape."""

    def attend(address: int) -> None:
        job = array(address, 1, ATTENTION_JOB)[0]
        max_rows = max(1, job.tile_rows // job.group) * job.group
        num_scores, num_rows = min(max_rows, job.held_rows) * SCORE_STRIDE, max_rows * job.head_dim
        num_places, num_sums = 2 * (CHUNK + MAX_TOKENS_AHEAD), max_rows * (job.padded_size + 2)
        num_panels = job.padded_size * job.panel_words
        num_numbers = num_scores + num_panels + 2 * num_places + num_rows + job.padded_size + 2 * num_sums
        scratch = np.empty(num_numbers + 16, np.float32)
        scores = (scratch.ctypes.data + 63) // 64 * 64
        panels = scores + num_scores * 4
        places = panels + num_panels * 4
        rows = places + num_places * 8
        zeros = rows + num_rows * 4
        part = zeros + job.padded_size * 4
        state = part + num_sums * 4
        array(zeros, job.padded_size, np.float32)[:] = 0
        buffers = rows, scores, places, panels, zeros

        s, first_unit, num_units = 0, 0, _num_units(job, 0)
        while s < job.num_sequences:
            unit = count_up(address)
            while s < job.num_sequences and unit >= first_unit + num_units:
                first_unit += num_units
                s += 1
                num_units = _num_units(job, s)
            if s < job.num_sequences:
                kv_head = (unit - first_unit) % job.num_kv_heads
                index = (unit - first_unit) // job.num_kv_heads
                if _queries(job, s)[1] == 1:
                    _attend_one(job, s, kv_head, index, buffers, part, state)
                else:
                    _attend_tile(job, s, kv_head, index, buffers, part, state)
        scratch[0] = 0  # numba frees an array after its last use: this keeps the array alive until here

    return Kernel(compiled(attend))
