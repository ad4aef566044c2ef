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

# Query rows of one tile: enough to make good use of a block in the cache, few enough that the scores stay in it too.
_TILE_ROWS = 32

# With more rows than this, computing with a block takes longer than loading it.
_STREAMING_ROWS = 8
# Bytes that tiles with few rows prefetch ahead: a little more than memory delivers within its latency.
_BYTES_AHEAD = 8192


# Fields named after tensors hold their addresses. score_rows, weigh_rows: the two functions of a variant, with tiles of
# `columns` tokens. group: query heads per kv head. table_width: entries from one row of the block tables to the next.
# table_rows: the row of each sequence, null if sequence s uses row s. query_starts: null if every sequence has one
# query. parts: float32 [sequence, kv head, chunk, group * (head_dim + 2)]. arrivals: int64 [sequence, kv head], zero
# between calls.
ATTENTION_JOB = job_dtype(
    """score_rows weigh_rows columns query query_token_bytes query_head_bytes out out_token_bytes out_head_bytes
    kv kv_block_bytes storage number_bytes num_kv_heads group head_dim block_size block_tables table_width
    table_rows context_lens query_starts num_sequences window parts arrivals max_chunks""",
    "scale",
)


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
def _tile_queries(group: int) -> int:
    """Returns the number of queries of a tile: _TILE_ROWS rows with all heads of the group, and at least one query."""
    return max(1, _TILE_ROWS // group)


@inlined
def _num_units(job: Any, s: int) -> int:
    """Returns the number of units of sequence s, 0 after the last sequence."""
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
    """Copies query rows as scaled float32. Row r is head r % group of the group, of query first_query + r // group."""
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
    """Returns the arrays of the part at an address: greatest scores, sums, and head_dim weighted values per row."""
    greatest = array(part, num_rows, np.float32)
    totals = array(part + num_rows * 4, num_rows, np.float32)
    sums = array(part + num_rows * 8, num_rows * job.head_dim, np.float32)
    return greatest, totals, sums


@inlined
def _clear(job: Any, part: int, num_rows: int) -> None:
    """Resets a part to that of rows that have seen no token."""
    greatest, totals, sums = _part_arrays(job, part, num_rows)
    for row in range(num_rows):
        greatest[row], totals[row] = -np.inf, 0
    for i in range(num_rows * job.head_dim):
        sums[i] = 0


@inlined
def _merge(job: Any, state: int, part: int, num_rows: int) -> None:
    """Merges a part into the state, which is the merged part of all chunks before."""
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
    """Divides the weighted values of a part by the sums and stores the rows; a row that saw no token becomes zeros."""
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
    """Returns the number of bytes from the keys of a head to its values in the same block."""
    return int(job.num_kv_heads * job.block_size * job.head_dim * job.number_bytes)


@inlined
def _distance(job: Any, num_rows: int) -> int:
    """Returns how many blocks ahead to prefetch.

    It is 0 if there are many rows: computing with a block then takes longer than loading the next one, and prefetching
    block by block costs more than it saves.
    """
    if num_rows > _STREAMING_ROWS:
        return 0
    return max(1, _BYTES_AHEAD // int(job.block_size * job.head_dim * job.number_bytes))


@inlined
def _stream(job: Any, table: Any, keys: int, first_block: int, num_blocks: int, index: int) -> int:
    """Returns the address of what a chunk reads at `index`: the keys of all blocks, then the values. 0 past the end."""
    if index >= 2 * num_blocks:
        return 0
    if index < num_blocks:
        return keys + int(table[first_block + index] * job.kv_block_bytes)
    return keys + int(table[first_block + index - num_blocks] * job.kv_block_bytes) + _to_values(job)


@inlined
def _walk_keys(
    job: Any, table: Any, heads: int, first: int, start: int, stop: int, rows: int, num_rows: int, scores: int
) -> None:
    """Computes the scores of the tokens [start, stop) for the rows; the scores begin at token `first`.

    Tiles begin at multiples of `columns`, in blocks and in chunks: up to columns - 1 tokens at either end are scored
    as well, and these scores are never used. The processor does not predict a jump to another block. Tiles with few
    rows therefore prefetch blocks at a distance; tiles with many rows prefetch the next keys, and the values of this
    block, which are read after all scores of the chunk.
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
    """Adds the values of the tokens [start, stop), weighted by their scores; the scores begin at token `first`."""
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
    """Computes the part of one chunk for the rows; the first rows are at first_position."""
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
    """Processes the unit of a sequence with one query: chunk `index` of those the query sees."""
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
    """Processes the unit of a tile of queries. The last tile of a prompt sees most tokens and has index 0."""
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
    """Returns the attention kernel, which serves every shape."""
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
        scratch[0] = 0  # numba frees an array after its last use: this keeps the array alive until here

    return Kernel(compiled(attend))
