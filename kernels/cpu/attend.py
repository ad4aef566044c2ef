"""Attention over KV blocks where they lie: decode and prefill are one kernel.

The context of a sequence is cut into chunks of CHUNK tokens, at its multiples. For a tile of query rows a chunk gives a
part: per row the greatest score, the sum of 2 ** (score - greatest), and the values weighed by these. Parts of a row
are merged from its first chunk to its last, and the weighed values divided by the sum at the end: online softmax
(Milakov and Gimelshein, 2018) over blocks of keys as in FlashAttention (Dao et al., 2022); the job's scale holds a
factor of log2(e), so that powers of two suffice.

Work is shared out in units, each the business of one kv head with all query heads that read it::

    one query in the sequence     a unit a chunk; who finishes the last one of a row's merges the parts, in order
    several queries               a unit a tile of queries, which walks its chunks itself

Cuts depend on positions alone: a row has the same bits in any batch, in any cut of its prompt, in decode and prefill.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kernels.cpu.compiler import SOURCES, compiled, inlined
from kernels.cpu.native import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LINE_BYTES,
    array,
    call,
    count_up,
    exp2,
    prefetch,
    read,
    write,
)
from kernels.cpu.team import Kernel, job_dtype
from kernels.cpu.tiles import CHUNK, SCORE_LANES, soften_row

# Query rows of one tile: enough that a block, once in the cache, is used well; few enough that scores stay there.
_TILE_ROWS = 32

# With more rows than this a block is worked on for longer than memory takes to bring it.
_STREAMING_ROWS = 8
# How far ahead few rows ask for what they read: what memory brings within its latency, and a bit more.
_BYTES_AHEAD = 8192


# Names of tensors are addresses. score_rows, weigh_rows: the two functions of a variant, of `columns` tokens a tile.
# group: query heads a kv head. table_width: from one row of the tables to the next; table_rows: which of them is a
# sequence's, null where both have one order. query_starts is null where every sequence has one query.
# parts: float32 [sequence, kv head, chunk, group * (head_dim + 2)]; arrivals: int64 [sequence, kv head], zero between
# calls.
ATTENTION_JOB = job_dtype(
    """score_rows weigh_rows columns query query_token_bytes query_head_bytes out out_token_bytes out_head_bytes
    kv kv_block_bytes storage number_bytes num_kv_heads group head_dim block_size block_tables table_width
    table_rows context_lens query_starts num_sequences window parts arrivals max_chunks""",
    "scale",
)


@inlined
def _queries(job: Any, s: int) -> tuple[int, int, int]:
    """Sequence s: (its first row of query, how many it has, its context_len)."""
    context_len = int(array(job.context_lens, job.num_sequences, np.int32)[s])
    if job.query_starts == 0:
        return s, 1, context_len
    starts = array(job.query_starts, job.num_sequences + 1, np.int32)
    return int(starts[s]), int(starts[s + 1]) - int(starts[s]), context_len


@inlined
def _first_seen(job: Any, position: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, position + 1 - job.window) if job.window > 0 else 0


@inlined
def _chunks(job: Any, first_position: int, last_position: int) -> tuple[int, int]:
    """The first of the chunks that queries at these positions see, and how many there are."""
    first = _first_seen(job, first_position) // CHUNK
    return first, last_position // CHUNK + 1 - first


@inlined
def _tile_queries(group: int) -> int:
    """Queries of a tile: with all heads of the group they make _TILE_ROWS rows, or one query does."""
    return max(1, _TILE_ROWS // group)


@inlined
def _num_units(job: Any, s: int) -> int:
    """Units of sequence s, 0 past the last."""
    if s >= job.num_sequences:
        return 0
    _, num_queries, context_len = _queries(job, s)
    if num_queries != 1:
        tile = _tile_queries(job.group)
        num_units = (num_queries + tile - 1) // tile
    else:
        num_units = max(1, _chunks(job, context_len - 1, context_len - 1)[1])
    return num_units * int(job.num_kv_heads)


@inlined
def _load_rows(job: Any, first_query: int, kv_head: int, num_rows: int, rows: int) -> None:
    """Query rows to float32 and scaled: row r is head r % group of the kv head's, of query first_query + r // group."""
    scale = np.float32(job.scale)
    for row in range(num_rows):
        source = job.query + (first_query + row // job.group) * job.query_token_bytes
        source += (kv_head * job.group + row % job.group) * job.query_head_bytes
        target = rows + row * job.head_dim * 4
        for i in range(job.head_dim):
            if job.storage == FLOAT32:
                number = read(FLOAT32, source, i)
            elif job.storage == BFLOAT16:
                number = read(BFLOAT16, source, i)
            else:
                number = read(FLOAT16, source, i)
            write(FLOAT32, target, i, number * scale)


@inlined
def _part_arrays(job: Any, part: int, num_rows: int) -> tuple[Any, Any, Any]:
    """A part at an address: greatest score and sum of each row, then its weighed values, head_dim numbers a row."""
    greatest = array(part, num_rows, np.float32)
    totals = array(part + num_rows * 4, num_rows, np.float32)
    sums = array(part + num_rows * 8, num_rows * job.head_dim, np.float32)
    return greatest, totals, sums


@inlined
def _clear(job: Any, part: int, num_rows: int) -> None:
    """The part of a row that has seen nothing."""
    greatest, totals, sums = _part_arrays(job, part, num_rows)
    for row in range(num_rows):
        greatest[row], totals[row] = -np.inf, 0
    for i in range(num_rows * job.head_dim):
        sums[i] = 0


@inlined
def _merge(job: Any, state: int, part: int, num_rows: int) -> None:
    """Adds a part to the state, itself a part of all that came before."""
    state_greatest, state_totals, state_sums = _part_arrays(job, state, num_rows)
    greatest, totals, sums = _part_arrays(job, part, num_rows)
    for row in range(num_rows):
        if totals[row] == 0:
            continue
        top = max(state_greatest[row], greatest[row])
        kept, added = exp2(state_greatest[row] - top), exp2(greatest[row] - top)
        state_greatest[row] = top
        state_totals[row] = state_totals[row] * kept + totals[row] * added
        for i in range(row * job.head_dim, (row + 1) * job.head_dim):
            state_sums[i] = state_sums[i] * kept + sums[i] * added


@inlined
def _finish(job: Any, first_query: int, kv_head: int, num_rows: int, part: int) -> None:
    """Divides a part, and stores its rows. A row that has seen nothing is zero."""
    _, totals, sums = _part_arrays(job, part, num_rows)
    for row in range(num_rows):
        target = job.out + (first_query + row // job.group) * job.out_token_bytes
        target += (kv_head * job.group + row % job.group) * job.out_head_bytes
        total = np.float32(1) if totals[row] == 0 else totals[row]
        for i in range(job.head_dim):
            number = sums[row * job.head_dim + i] / total
            if job.storage == FLOAT32:
                write(FLOAT32, target, i, number)
            elif job.storage == BFLOAT16:
                write(BFLOAT16, target, i, number)
            else:
                write(FLOAT16, target, i, number)


@inlined
def _prefetch(address: int, num_bytes: int) -> None:
    for line in range(0, num_bytes, LINE_BYTES):
        prefetch(address + line)


@inlined
def _to_values(job: Any) -> int:
    """From the keys of a head to its values, in one block."""
    return int(job.num_kv_heads * job.block_size * job.head_dim * job.number_bytes)


@inlined
def _distance(job: Any, num_rows: int) -> int:
    """How many blocks ahead the next one to ask for is; 0: rows are so many that each block is waited for less than it
    is worked on, and asking along the way would cost more than it brings."""
    if num_rows > _STREAMING_ROWS:
        return 0
    return max(1, _BYTES_AHEAD // int(job.block_size * job.head_dim * job.number_bytes))


@inlined
def _stream(job: Any, table: Any, keys: int, first_block: int, num_blocks: int, index: int) -> int:
    """What a chunk reads, block by block: the keys of all of them, then the values. 0 past the end."""
    if index >= 2 * num_blocks:
        return 0
    if index < num_blocks:
        return keys + int(table[first_block + index] * job.kv_block_bytes)
    return keys + int(table[first_block + index - num_blocks] * job.kv_block_bytes) + _to_values(job)


@inlined
def _walk_keys(
    job: Any, table: Any, heads: int, first: int, start: int, stop: int, rows: int, num_rows: int, scores: int
) -> None:
    """Scores of the tokens [start, stop) against the rows; scores begin at token `first`.

    Tiles begin at multiples of `columns`, in blocks and in chunks alike: up to columns - 1 tokens at either end are
    scored along, whatever they hold, and not looked at again. The processor foresees no jump to another block: few rows
    ask for blocks at a distance as they go, many for the next keys, and for the values of this block, whose turn comes
    when the chunk's scores are done.
    """
    block, columns, token_bytes = start // job.block_size, job.columns, job.head_dim * job.number_bytes
    first_block, num_blocks = block, (stop - 1) // job.block_size + 1 - block
    distance = _distance(job, num_rows)
    for index in range(min(distance, 2 * num_blocks)):
        _prefetch(_stream(job, table, heads, first_block, num_blocks, index), job.block_size * token_bytes)
    token, offset = start, start - block * job.block_size
    while token < stop:
        before = offset % columns
        count = min(job.block_size - offset, stop - token)
        padded = (before + count + columns - 1) // columns * columns
        keys = heads + table[block] * job.kv_block_bytes + (offset - before) * token_bytes
        ahead = 0
        if distance > 0:
            ahead = _stream(job, table, heads, first_block, num_blocks, block - first_block + distance)
        else:
            _prefetch(keys + _to_values(job), (before + count) * token_bytes)
            following = min(job.block_size, stop - token - count)
            if following > 0:
                _prefetch(heads + table[block + 1] * job.kv_block_bytes, following * token_bytes)
        call(job.score_rows, rows, num_rows, keys, padded, scores + (token - before - first) * 4, ahead)
        token, block, offset = token + count, block + 1, 0


@inlined
def _walk_values(
    job: Any, table: Any, heads: int, first: int, start: int, stop: int, scores: int, num_rows: int, sums: int
) -> None:
    """Adds the values of the tokens [start, stop), weighed by their scores; scores begin at token `first`."""
    block, token_bytes = start // job.block_size, job.head_dim * job.number_bytes
    first_block, num_blocks = block, (stop - 1) // job.block_size + 1 - block
    distance = _distance(job, num_rows)
    token, offset = start, start - block * job.block_size
    while token < stop:
        count = min(job.block_size - offset, stop - token)
        values = heads + table[block] * job.kv_block_bytes + _to_values(job) + offset * token_bytes
        ahead = 0
        if distance > 0:
            ahead = _stream(job, table, heads, first_block, num_blocks, num_blocks + block - first_block + distance)
        call(job.weigh_rows, scores + (token - first) * 4, num_rows, values, count, sums, ahead)
        token, block, offset = token + count, block + 1, 0


@inlined
def _attend_chunk(
    job: Any,
    s: int,
    kv_head: int,
    chunk: int,
    first_position: int,
    num_rows: int,
    rows: int,
    scores: int,
    part: int,
) -> None:
    """Makes the part of one chunk for the rows, the first of which are at first_position."""
    greatest, totals, _ = _part_arrays(job, part, num_rows)
    last_position = first_position + (num_rows - 1) // job.group
    first = chunk * CHUNK
    start = max(first, _first_seen(job, first_position))
    stop = min(first + CHUNK, last_position + 1)
    table_row = s if job.table_rows == 0 else int(array(job.table_rows, job.num_sequences, np.int32)[s])
    table = array(job.block_tables + table_row * job.table_width * 4, job.table_width, np.int32)
    head_bytes = job.block_size * job.head_dim * job.number_bytes
    keys = job.kv + kv_head * head_bytes

    _clear(job, part, num_rows)
    _walk_keys(job, table, keys, first, start, stop, rows, num_rows, scores)
    begin = (start - first) // SCORE_LANES * SCORE_LANES
    end = (stop - first + SCORE_LANES - 1) // SCORE_LANES * SCORE_LANES
    for row in range(num_rows):
        position = first_position + row // job.group
        seen_from = max(start, _first_seen(job, position)) - first
        seen_to = min(stop, position + 1) - first
        greatest[row], totals[row] = soften_row(scores + row * CHUNK * 4, begin, seen_from, seen_to, end)
    _walk_values(job, table, keys, first, start, stop, scores, num_rows, part + num_rows * 8)


@inlined
def _attend_one(job: Any, s: int, kv_head: int, index: int, rows: int, scores: int, part: int, state: int) -> None:
    """The unit of a single query: chunk `index` of those it sees."""
    query, _, context_len = _queries(job, s)
    num_rows, position = job.group, context_len - 1
    if context_len == 0:
        _clear(job, part, num_rows)
        _finish(job, query, kv_head, num_rows, part)
        return
    _load_rows(job, query, kv_head, num_rows, rows)
    first_chunk, num_chunks = _chunks(job, position, position)
    if num_chunks == 1:
        _attend_chunk(job, s, kv_head, first_chunk, position, num_rows, rows, scores, part)
        _finish(job, query, kv_head, num_rows, part)
        return

    row_of_parts = s * job.num_kv_heads + kv_head
    part_bytes = num_rows * (job.head_dim + 2) * 4
    parts = job.parts + row_of_parts * job.max_chunks * part_bytes
    mine = parts + index * part_bytes
    _attend_chunk(job, s, kv_head, first_chunk + index, position, num_rows, rows, scores, mine)
    arrival = job.arrivals + row_of_parts * 8
    if count_up(arrival) == num_chunks - 1:
        array(arrival, 1, np.int64)[0] = 0
        _clear(job, state, num_rows)
        for i in range(num_chunks):
            _merge(job, state, parts + i * part_bytes, num_rows)
        _finish(job, query, kv_head, num_rows, state)


@inlined
def _attend_tile(job: Any, s: int, kv_head: int, index: int, rows: int, scores: int, part: int, state: int) -> None:
    """The unit of a tile of queries. The last tile, which sees most, has index 0."""
    first_query, num_queries, context_len = _queries(job, s)
    tile = _tile_queries(job.group)
    skipped = ((num_queries + tile - 1) // tile - 1 - index) * tile
    num_rows = min(tile, num_queries - skipped) * job.group
    position = context_len - num_queries + skipped
    _load_rows(job, first_query + skipped, kv_head, num_rows, rows)
    first_chunk, num_chunks = _chunks(job, position, position + num_rows // job.group - 1)
    if num_chunks == 1:
        _attend_chunk(job, s, kv_head, first_chunk, position, num_rows, rows, scores, part)
        _finish(job, first_query + skipped, kv_head, num_rows, part)
        return
    _clear(job, state, num_rows)
    for chunk in range(first_chunk, first_chunk + num_chunks):
        _attend_chunk(job, s, kv_head, chunk, position, num_rows, rows, scores, part)
        _merge(job, state, part, num_rows)
    _finish(job, first_query + skipped, kv_head, num_rows, state)


@cache
def attend_kernel() -> Kernel:
    """Attention for any shape."""
    sources = SOURCES

    def attend(address: int) -> None:
        _ = sources
        job = array(address, 1, ATTENTION_JOB)[0]
        max_rows = _tile_queries(job.group) * job.group
        scratch = np.empty(max_rows * (3 * job.head_dim + 4 + CHUNK) + 16, np.float32)
        scores = (scratch.ctypes.data + 63) // 64 * 64
        rows = scores + max_rows * CHUNK * 4
        part = rows + max_rows * job.head_dim * 4
        state = part + max_rows * (job.head_dim + 2) * 4

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
                    _attend_one(job, s, kv_head, index, rows, scores, part, state)
                else:
                    _attend_tile(job, s, kv_head, index, rows, scores, part, state)
        scratch[0] = 0  # an array is freed after its last mention: this one is not to be freed earlier

    return Kernel(compiled(attend))
