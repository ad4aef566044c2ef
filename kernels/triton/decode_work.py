"""The work list of a step's decodes: made on the device once per step, read by every layer.

The context of a sequence is cut into chunks at multiples of their length. An item of the list is a chunk; an item and
a kv head make a unit of work::

    context_lens     600          40     0                   chunks of 256 tokens
    items            0│1│2        3      4                   [row, table row, begin, end, is whole]
                     └ parts 0–2, merged at the end
                                  └ whole: written directly; an empty row becomes zeros

The cuts depend only on the row's own context, so a row has the same bits in any batch. A chunk has `chunk_tokens`
tokens, or twice as many, four times, …: the smallest length for which the context has at most MAX_CHUNKS chunks. This
bounds the buffers for any context, and the length of a chunk still depends only on the row's context.

The host reads no number from the device, and the buffers keep their addresses, so the list can be made inside a
captured graph, for lengths that were unknown at the capture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl

from kernels.interface import AttentionShape
from kernels.triton.jit import kernel, padded
from kernels.triton.tuning import DecodeTuning, decode_tuning

MAX_CHUNKS = 64
"""Maximum number of chunks of one context."""

_NUM_DOUBLINGS = 8  # enough for four million tokens

ITEM_FIELDS: tl.constexpr = tl.constexpr(8)
"""int32 numbers from one item to the next. Five are used; eight fill a sector of 32 bytes."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """The chunks that layers with a certain window have to read.

    items[max_items, ITEM_FIELDS] int32, of which the first num_items[0] are valid; num_items[1] int32.
    first_items[S + 1] int32: row s owns the items [first_items[s], first_items[s + 1]).
    """

    items: torch.Tensor
    num_items: torch.Tensor
    first_items: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The decodes of one step. It is valid until the planner plans again on the same stream.

    block_tables[R, M] int32. lists: a work list for each window. parts[max_items, Hq, D] and part_logs[max_items, Hq],
    float32: the result of each chunk and head, and log2 of the sum of its weights; empty if no context can have two
    chunks.
    """

    num_rows: int
    max_chunks: int
    block_tables: torch.Tensor
    lists: dict[int, WorkList]
    parts: torch.Tensor
    part_logs: torch.Tensor
    tuning: DecodeTuning


class DecodePlanner:
    """Allocates the buffers for the decodes of a step once; `plan` fills them.

    A planner serves one stream. Most of its memory holds the parts, about max_num_seqs * max_chunks * Hq * D * 4 bytes;
    see `num_bytes`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        max_num_seqs: int,
        max_context_len: int,
        windows: Sequence[int] = (0,),
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Sizes the buffers for max_num_seqs rows, contexts of max_context_len tokens, and layers with these windows.

        tuning: by default the entry of the table in `kernels.triton.tuning`.
        """
        self.tuning = tuning or decode_tuning(shape, device)
        num_chunks = max(1, -(-max_context_len // self.tuning.chunk_tokens))
        self.max_chunks = min(MAX_CHUNKS, num_chunks)
        max_items = max_num_seqs * self.max_chunks
        num_parts = max_items if self.max_chunks > 1 else 0
        self._max_num_seqs = max_num_seqs
        self._lists = {window: _empty_list(max_num_seqs, max_items, device) for window in set(windows)}
        self._parts = torch.empty((num_parts, shape.num_heads, shape.head_dim), dtype=torch.float32, device=device)
        self._part_logs = torch.empty((num_parts, shape.num_heads), dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the planner holds."""
        lists = [tensor for own in self._lists.values() for tensor in (own.items, own.num_items, own.first_items)]
        return sum(tensor.nbytes for tensor in (self._parts, self._part_logs, *lists))

    def plan(
        self,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> DecodeWork:
        """Returns the work for context_lens[S], at most max_context_len each; 0 is a padding row.

        S is at most max_num_seqs. Row s reads block_tables[table_rows[s]], or block_tables[s] without table_rows[S], so
        the tables of the slots need not be copied. Launches one kernel per window; does not wait for the device or
        allocate.
        """
        num_rows = len(context_lens)
        if num_rows > self._max_num_seqs:
            raise ValueError(f"{num_rows} rows, but the planner has room for {self._max_num_seqs}")
        for window, own in self._lists.items():
            if num_rows:
                _list_chunks[(self.max_chunks,)](
                    context_lens,
                    context_lens if table_rows is None else table_rows,
                    own.items,
                    own.num_items,
                    own.first_items,
                    num_rows,
                    window,
                    has_table_rows=table_rows is not None,
                    chunk_tokens=self.tuning.chunk_tokens,
                    max_chunks=MAX_CHUNKS,
                    num_doublings=_NUM_DOUBLINGS,
                    tile_rows=padded(self._max_num_seqs),
                    num_warps=4,
                )
        return DecodeWork(
            num_rows=num_rows,
            max_chunks=self.max_chunks,
            block_tables=block_tables,
            lists=self._lists,
            parts=self._parts,
            part_logs=self._part_logs,
            tuning=self.tuning,
        )


def _empty_list(max_num_seqs: int, max_items: int, device: torch.device) -> WorkList:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return WorkList(numbers(max_items, ITEM_FIELDS.value), numbers(1), numbers(max_num_seqs + 1))


@kernel(unspecialized=("context_lens", "table_rows", "num_rows", "window"))
def _list_chunks(
    context_lens: tl.tensor,
    table_rows: tl.tensor,
    items: tl.tensor,
    num_items: tl.tensor,
    first_items: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    has_table_rows: tl.constexpr,
    chunk_tokens: tl.constexpr,
    max_chunks: tl.constexpr,
    num_doublings: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    """Lists chunk i of every row in program i. All rows are one tile, so each program knows the places of its items."""
    rows = tl.arange(0, tile_rows)
    exists = rows < num_rows
    ends = tl.load(context_lens + rows, mask=exists, other=0)
    begins = tl.where(window > 0, tl.maximum(ends - window, 0), 0)

    lengths = tl.full([tile_rows], chunk_tokens, tl.int32)
    for _ in tl.static_range(num_doublings):
        num_chunks = (ends + lengths - 1) // lengths - begins // lengths
        lengths = tl.where(num_chunks > max_chunks, lengths * 2, lengths)
    num_chunks = (ends + lengths - 1) // lengths - begins // lengths
    num_chunks = tl.where(exists, tl.maximum(num_chunks, 1), 0)  # an empty context has an item too, which writes zeros
    after = tl.cumsum(num_chunks, 0)
    first = after - num_chunks

    which = tl.program_id(0)
    if which == 0:
        tl.store(first_items + rows, first, mask=exists)
        tl.store(first_items + num_rows, tl.sum(num_chunks, 0))
        tl.store(num_items, tl.sum(num_chunks, 0))

    owns = which < num_chunks
    chunk = begins // lengths + which
    place = items + (first + which) * ITEM_FIELDS
    own_table = rows
    if has_table_rows:
        own_table = tl.load(table_rows + rows, mask=exists, other=0)
    tl.store(place, rows, mask=owns)
    tl.store(place + 1, own_table, mask=owns)
    tl.store(place + 2, tl.maximum(begins, chunk * lengths), mask=owns)
    tl.store(place + 3, tl.minimum(ends, (chunk + 1) * lengths), mask=owns)
    tl.store(place + 4, (num_chunks == 1).to(tl.int32), mask=owns)
