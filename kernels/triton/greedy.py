"""Greedy sampling on the device."""

import torch
import triton.language as tl

from kernels.triton.jit import kernel, padded

_PIECE = 8192


def choose_greedily(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Writes the id of the largest logit of each row of logits[S, V] to token_ids[S], the lowest id among equal logits.

    Mutates token_ids, int32 or int64. NaN counts as -inf; a row with nothing else gets id 0. Launches two kernels: the
    first searches pieces of the vocabulary, so that a single row occupies several multiprocessors; the second compares
    the results of the pieces.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    num_pieces = -(-vocab_size // _PIECE)
    greatest = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    winners = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    _choose_in_pieces[(num_rows, num_pieces)](
        logits, greatest, winners, logits.stride(0), vocab_size, tile=_PIECE, num_warps=8
    )
    _choose_among_pieces[(num_rows,)](
        greatest, winners, token_ids, num_pieces=num_pieces, tile=padded(num_pieces), num_warps=1
    )


@kernel()
def _choose_in_pieces(
    logits: tl.tensor,
    greatest: tl.tensor,
    winners: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * tile + tl.arange(0, tile)
    exists = ids < vocab_size
    scores = tl.load(logits + row * row_stride + ids, mask=exists, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    best = tl.max(scores, 0)
    place = row * tl.num_programs(1) + piece
    tl.store(greatest + place, best)
    tl.store(winners + place, tl.min(tl.where(exists & (scores == best), ids, vocab_size), 0))


@kernel(unspecialized=("token_ids",))
def _choose_among_pieces(
    greatest: tl.tensor, winners: tl.tensor, token_ids: tl.tensor, num_pieces: tl.constexpr, tile: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, tile)
    exists = pieces < num_pieces
    best = tl.load(greatest + row * num_pieces + pieces, mask=exists, other=float("-inf"))
    ids = tl.load(winners + row * num_pieces + pieces, mask=exists, other=2**31 - 1)
    is_best = exists & (best == tl.max(best, 0))
    tl.store(token_ids + row, tl.min(tl.where(is_best, ids, 2**31 - 1), 0))
