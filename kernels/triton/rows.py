"""The start and the end of a step: makes the model's rows from slots, and writes sampled tokens back to the slots.

The state of a sequence that a step needs stays on the device, one row of int32 numbers per slot::

    states[num_slots, STATE_FIELDS]    last token │ num tokens │ has ended │ max total tokens │ 4 sampling parameters

The last known token has position `num tokens - 1`, and a decode computes its KV. A step can therefore follow another
before the host has read what the first one sampled. Slots that have ended are not changed: their rows have an empty
context and write to the null block. A slot that has ended from the start serves as padding.
"""

from enum import IntEnum

import torch
import triton.language as tl

from kernels.triton.jit import kernel

STATE_FIELDS = 8
"""int32 numbers per slot; together they fill a sector of 32 bytes."""

RESULT_FIELDS = 3
"""int32 numbers per result: token id, reason of its end or 0, and 1 if the slot had ended before."""


class StateField(IntEnum):
    """Columns of `states`. TEMPERATURE, TOP_P and MIN_P hold the bits of a float32."""

    LAST_TOKEN = 0
    NUM_TOKENS = 1
    HAS_ENDED = 2
    MAX_TOTAL_TOKENS = 3
    TEMPERATURE = 4
    TOP_K = 5
    TOP_P = 6
    MIN_P = 7


_TILE = 256
_FIELDS: tl.constexpr = tl.constexpr(STATE_FIELDS)
_RESULTS: tl.constexpr = tl.constexpr(RESULT_FIELDS)


def open_rows(
    states: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    known: torch.Tensor | None = None,
) -> None:
    """Writes the model's inputs for the rows of slots[T] int32: the last token of each slot, at its position.

    states[N, STATE_FIELDS] int32, block_tables[N, M] int32. known[2, T] int32: the token ids and positions that rows of
    prompts compute instead. A row with a negative token id computes the slot's last token; its position is ignored.

    Mutates token_ids[T] int32, positions[T] int32, context_lens[T] int32 (including the row's own token; 0 if the slot
    has ended) and slot_mapping[T] int64, the token slots (0, in the null block, if the slot has ended).
    """
    num_rows = len(slots)
    if not num_rows:
        return
    _open_rows[(-(-num_rows // _TILE),)](
        states,
        block_tables,
        slots,
        slots if known is None else known,
        token_ids,
        positions,
        context_lens,
        slot_mapping,
        num_rows,
        block_tables.stride(0),
        block_size=block_size,
        has_known=known is not None,
        tile=_TILE,
        num_warps=4,
    )


def close_rows(
    states: torch.Tensor,
    end_kinds: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    peaks: torch.Tensor,
    results: torch.Tensor,
    length_reason: int,
    not_finite_reason: int,
) -> None:
    """Makes token_ids[R] int32 the last tokens of slots[R] int32, and ends the sequences that these tokens end.

    end_kinds[N, V] uint8: the reason for which a token ends a slot's sequence, 0 if it does not. Otherwise the sequence
    ends with `length_reason` when it reaches its maximum number of tokens. peaks[R] float32: the largest logit of each
    row as the model made it. If it is not finite, the token has no meaning: the sequence gets token 0 and ends with
    `not_finite_reason`. Slots are distinct, except those that have ended.

    Mutates results[R, RESULT_FIELDS] int32 (token 0 and reason 0 for slots that had ended before), and the states of
    the other slots.
    """
    num_rows = len(slots)
    if not num_rows:
        return
    _close_rows[(-(-num_rows // _TILE),)](
        states,
        end_kinds,
        slots,
        token_ids,
        peaks,
        results,
        num_rows,
        end_kinds.stride(0),
        length_reason,
        not_finite_reason,
        tile=_TILE,
        num_warps=4,
    )


@kernel(
    unspecialized=(
        "states",
        "block_tables",
        "slots",
        "known",
        "token_ids",
        "positions",
        "context_lens",
        "slot_mapping",
        "num_rows",
        "table_stride",
    )
)
def _open_rows(
    states: tl.tensor,
    block_tables: tl.tensor,
    slots: tl.tensor,
    known: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    context_lens: tl.tensor,
    slot_mapping: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.constexpr,
    has_known: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = rows < num_rows
    own = tl.load(slots + rows, mask=exists, other=0).to(tl.int64)
    state = states + own * _FIELDS
    token = tl.load(state, mask=exists, other=0)
    position = tl.load(state + 1, mask=exists, other=1) - 1
    is_live = tl.load(state + 2, mask=exists, other=1) == 0
    if has_known:
        given = tl.load(known + rows, mask=exists, other=-1)
        given_position = tl.load(known + num_rows + rows, mask=exists, other=0)
        position = tl.where(given < 0, position, given_position)
        token = tl.where(given < 0, token, given)
    position = tl.where(is_live, position, 0)
    block = tl.load(block_tables + own * table_stride + position // block_size, mask=exists & is_live, other=0)
    place = block.to(tl.int64) * block_size + position % block_size
    tl.store(token_ids + rows, token, mask=exists)
    tl.store(positions + rows, position, mask=exists)
    tl.store(context_lens + rows, tl.where(is_live, position + 1, 0), mask=exists)
    tl.store(slot_mapping + rows, tl.where(is_live, place, 0), mask=exists)


@kernel(
    unspecialized=(
        "states",
        "end_kinds",
        "slots",
        "token_ids",
        "peaks",
        "results",
        "num_rows",
        "kinds_stride",
        "length_reason",
        "not_finite_reason",
    )
)
def _close_rows(
    states: tl.tensor,
    end_kinds: tl.tensor,
    slots: tl.tensor,
    token_ids: tl.tensor,
    peaks: tl.tensor,
    results: tl.tensor,
    num_rows: tl.tensor,
    kinds_stride: tl.tensor,
    length_reason: tl.tensor,
    not_finite_reason: tl.tensor,
    tile: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = rows < num_rows
    own = tl.load(slots + rows, mask=exists, other=0).to(tl.int64)
    state = states + own * _FIELDS
    had_ended = tl.load(state + 2, mask=exists, other=1)
    lives = exists & (had_ended == 0)
    is_finite = tl.abs(tl.load(peaks + rows, mask=lives, other=0.0)) < float("inf")  # false for NaN
    token = tl.where(is_finite, tl.load(token_ids + rows, mask=lives, other=0), 0)
    num_tokens = tl.load(state + 1, mask=lives, other=0) + 1
    most_tokens = tl.load(state + 3, mask=lives, other=0)
    kind = tl.load(end_kinds + own * kinds_stride + token, mask=lives, other=0).to(tl.int32)
    reason = tl.where(kind != 0, kind, tl.where(num_tokens >= most_tokens, length_reason, 0))
    reason = tl.where(is_finite, reason, not_finite_reason)
    tl.store(state, token, mask=lives)
    tl.store(state + 1, num_tokens, mask=lives)
    tl.store(state + 2, (reason != 0).to(tl.int32), mask=lives)
    tl.store(results + rows * _RESULTS, token, mask=exists)
    tl.store(results + rows * _RESULTS + 1, tl.where(lives, reason, 0), mask=exists)
    tl.store(results + rows * _RESULTS + 2, had_ended, mask=exists)
