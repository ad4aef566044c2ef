"""Launches as bytes: the counts, and then the arrays one after the other, the widest numbers first.

│ num_decodes T S columns L (int32, and 4 bytes of padding) │ slot_mapping[T] logit_rows[L] (int64)
│ token_ids[T] positions[T] query_starts[S + 1] context_lens[S] block_tables[S, columns] (int32) │
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.parallel.channel import ChannelBroken
from executor.plans.plan import Ints
from executor.slots.launch import Launch

_COUNTS = struct.Struct("<5i4x")


def to_bytes(launch: Launch, block_size: int) -> bytes:
    """Returns a launch with the block tables of its own sequences alone, as wide as the longest context needs."""
    num_columns = launch.num_table_columns(block_size)
    arrays = (
        launch.slot_mapping,
        launch.logit_rows,
        launch.token_ids,
        launch.positions,
        launch.query_starts,
        launch.context_lens,
        launch.block_tables[launch.slots, :num_columns],
    )
    counts = _COUNTS.pack(launch.num_decodes, launch.num_rows, len(launch.slots), num_columns, len(launch.logit_rows))
    return counts + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def from_bytes(payload: bytearray) -> Launch:
    """Returns the launch, whose arrays are views of the payload. Raises ChannelBroken for another number of bytes."""
    if len(payload) < _COUNTS.size:
        raise ChannelBroken("sends a launch without counts")
    num_decodes, num_rows, num_sequences, num_columns, num_logits = _COUNTS.unpack_from(payload)
    sizes = (num_rows, num_logits, num_rows, num_rows, num_sequences + 1, num_sequences, num_sequences * num_columns)
    wide, narrow = sizes[:2], sizes[2:]
    num_bytes = _COUNTS.size + 8 * sum(wide) + 4 * sum(narrow)
    if min(num_decodes, *sizes) < 0 or num_decodes > num_sequences or len(payload) != num_bytes:
        raise ChannelBroken(f"sends a launch of {len(payload)} bytes in place of {num_bytes}")
    int64 = _arrays(payload, _COUNTS.size, wide, np.dtype(np.int64))
    int32 = _arrays(payload, _COUNTS.size + 8 * sum(wide), narrow, np.dtype(np.int32))
    slot_mapping, logit_rows = int64
    token_ids, positions, query_starts, context_lens, tables = int32
    return Launch(
        num_decodes=num_decodes,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        slots=np.arange(num_sequences, dtype=np.int32),
        query_starts=query_starts,
        context_lens=context_lens,
        logit_rows=logit_rows,
        block_tables=tables.reshape(num_sequences, num_columns),
    )


def copies_from_bytes(payload: bytearray) -> Ints:
    """Returns copies[n, 2] of blocks. Raises ChannelBroken for another number of bytes."""
    if len(payload) % 8:
        raise ChannelBroken("sends half a pair of blocks")
    return np.frombuffer(payload, np.int32).reshape(-1, 2)


def _arrays(payload: bytearray, offset: int, sizes: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    for size in sizes:
        yield np.frombuffer(payload, dtype, size, offset)
        offset += size * dtype.itemsize
