"""Log-probabilities of tokens: float32, of one row of logits each.

Rank 1 is the most probable token; lower ids come first among equals. Rows are worked off in pieces, so that temporaries
stay within some 100 MB however large the vocabulary is.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plans.plan import Floats, Ints, Logprobs
from executor.sampling.likeliest import likeliest

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

# Numbers handled at once.
_CHUNK = 1 << 22


def score(logits: Tensor, token_ids: Ints, nums: Ints) -> Logprobs:
    """Of logits[num_rows, vocab_size]: of each row token_ids[row], then its nums[row] - 1 most probable ones."""
    pieces = [_score(logits[rows], token_ids[rows], nums[rows]) for rows in row_pieces(*logits.shape)]
    return join(pieces)


def most_probable(logits: Tensor, nums: Ints) -> Logprobs:
    """Of each row of logits[num_rows, vocab_size] the nums[row] most probable ones, without ranks."""
    pieces = [_most_probable(logits[rows], nums[rows]) for rows in row_pieces(*logits.shape)]
    return join(pieces)


def row_pieces(num_rows: int, vocab_size: int) -> list[slice]:
    """All rows, in pieces of a bounded number of logits."""
    size = max(1, _CHUNK // vocab_size)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _score(logits: Tensor, token_ids: Ints, nums: Ints) -> Logprobs:
    num_likeliest = int(nums.max()) - 1
    likeliest_ids, log_sums, own_ranks = _rank(logits, token_ids, num_likeliest)
    ids = np.concatenate((token_ids[:, None].astype(np.int64), likeliest_ids), axis=1)
    ranks = np.broadcast_to(np.arange(num_likeliest + 1, dtype=np.int32), ids.shape).copy()
    ranks[:, 0] = own_ranks
    asked = np.arange(num_likeliest + 1) < nums[:, None]
    return Logprobs(ids[asked].astype(np.int32), _logprobs(logits, ids, log_sums)[asked], ranks[asked])


def _most_probable(logits: Tensor, nums: Ints) -> Logprobs:
    ids, log_sums, _ = _rank(logits, None, int(nums.max()))
    asked = np.arange(ids.shape[1]) < nums[:, None]
    return Logprobs(ids[asked].astype(np.int32), _logprobs(logits, ids, log_sums)[asked], None)


def _logprobs(logits: Tensor, ids: Longs, log_sums: Doubles) -> Floats:
    """Of ids[num_rows, n]."""
    chosen = logits.gather(1, torch.from_numpy(ids).to(logits.device)).cpu().double().numpy()
    return (chosen - log_sums[:, None]).astype(np.float32)


def _rank(logits: Tensor, token_ids: Ints | None, count: int) -> tuple[Longs, Doubles, Ints]:
    """See `kernels.cpu.rank`."""
    if logits.device.type == "cpu":
        from kernels import cpu  # loads numba, which a GPU host does without

        return cpu.rank(logits, token_ids, count)
    return rank_on_device(logits, token_ids, count)


def rank_on_device(logits: Tensor, token_ids: Ints | None, count: int) -> tuple[Longs, Doubles, Ints]:
    """The same in torch, on any device."""
    logits = logits.float()
    log_sums = torch.logsumexp(logits, dim=-1).cpu().double().numpy()
    ids = likeliest(logits, count).cpu().numpy() if count else np.empty((len(logits), 0), np.int64)
    if token_ids is None:
        return ids, log_sums, np.zeros(len(logits), np.int32)
    own_ids = torch.from_numpy(token_ids).to(logits.device).long().unsqueeze(1)
    own, everybody = logits.gather(1, own_ids), torch.arange(logits.shape[1], device=logits.device)
    num_before = ((logits > own) | ((logits == own) & (everybody < own_ids))).sum(dim=-1)
    return ids, log_sums, (num_before + 1).cpu().numpy().astype(np.int32)


def join(pieces: list[Logprobs]) -> Logprobs:
    """One after the other; at least one."""
    ranks = [piece.ranks for piece in pieces if piece.ranks is not None]
    return Logprobs(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate(ranks) if ranks else None,
    )
