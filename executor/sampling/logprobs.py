"""Log-probabilities of tokens: float32, each from one row of logits.

Rank 1 is the most probable token; lower ids come first among equals. Rows are processed in pieces, so that temporaries
stay within about 100 MB for any vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plans.plan import Floats, Ints, Logprobs

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

# Maximum number of logits handled at once.
_CHUNK = 1 << 22


def score(logits: Tensor, token_ids: Ints, nums: Ints) -> Logprobs:
    """Scores token_ids[row] and the nums[row] - 1 most probable tokens of each row of logits[num_rows, vocab_size]."""
    pieces = [_score(logits[rows], token_ids[rows], nums[rows]) for rows in row_pieces(*logits.shape)]
    return join(pieces)


def most_probable(logits: Tensor, nums: Ints) -> Logprobs:
    """Scores the nums[row] most probable tokens of each row of logits[num_rows, vocab_size], without ranks."""
    pieces = [_most_probable(logits[rows], nums[rows]) for rows in row_pieces(*logits.shape)]
    return join(pieces)


def row_pieces(num_rows: int, vocab_size: int) -> list[slice]:
    """Returns all rows in pieces with a bounded number of logits."""
    size = max(1, _CHUNK // vocab_size)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _score(logits: Tensor, token_ids: Ints, nums: Ints) -> Logprobs:
    num_others = int(nums.max()) - 1
    other_ids, log_sums, own_ranks = _rank(logits, token_ids, num_others)
    ids = np.concatenate((token_ids[:, None].astype(np.int64), other_ids), axis=1)
    ranks = np.broadcast_to(np.arange(num_others + 1, dtype=np.int32), ids.shape).copy()
    ranks[:, 0] = own_ranks
    is_wanted = np.arange(num_others + 1) < nums[:, None]
    return Logprobs(ids[is_wanted].astype(np.int32), _logprobs(logits, ids, log_sums)[is_wanted], ranks[is_wanted])


def _most_probable(logits: Tensor, nums: Ints) -> Logprobs:
    ids, log_sums, _ = _rank(logits, None, int(nums.max()))
    is_wanted = np.arange(ids.shape[1]) < nums[:, None]
    return Logprobs(ids[is_wanted].astype(np.int32), _logprobs(logits, ids, log_sums)[is_wanted], None)


def _logprobs(logits: Tensor, ids: Longs, log_sums: Doubles) -> Floats:
    """Returns the log-probabilities of ids[num_rows, n]."""
    chosen = logits.gather(1, torch.from_numpy(ids).to(logits.device)).cpu().double().numpy()
    return (chosen - log_sums[:, None]).astype(np.float32)


def _rank(logits: Tensor, token_ids: Ints | None, count: int) -> tuple[Longs, Doubles, Ints]:
    """Ranks tokens as `kernels.cpu.rank` does."""
    if logits.device.type == "cpu":
        from kernels import cpu  # loads numba, which a GPU host does without

        return cpu.rank(logits, token_ids, count)
    return rank_on_device(logits, token_ids, count)


def rank_on_device(logits: Tensor, token_ids: Ints | None, count: int) -> tuple[Longs, Doubles, Ints]:
    """Ranks tokens in torch, on any device, with the same result."""
    logits = logits.float()
    log_sums = torch.logsumexp(logits, dim=-1).cpu().double().numpy()
    ids = most_likely(logits, count).cpu().numpy() if count else np.empty((len(logits), 0), np.int64)
    if token_ids is None:
        return ids, log_sums, np.zeros(len(logits), np.int32)
    own_ids = torch.from_numpy(token_ids).to(logits.device).long().unsqueeze(1)
    own, ids_in_order = logits.gather(1, own_ids), torch.arange(logits.shape[1], device=logits.device)
    num_before = ((logits > own) | ((logits == own) & (ids_in_order < own_ids))).sum(dim=-1)
    return ids, log_sums, (num_before + 1).cpu().numpy().astype(np.int32)


def most_likely(logits: Tensor, count: int) -> Tensor:
    """Returns the ids [rows, count] of the largest logits, largest first, lower ids first among equals.

    Each (logit, id) becomes one integer that sorts in this order: the bits of the float32, sign-folded so that they
    sort as the numbers do, above the complement of the id.
    """
    vocab_size = logits.shape[1]
    # Adding zero turns -0.0 into 0.0: equal logits must have equal bits.
    bits = (logits.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    complements = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | complements
    return vocab_size - 1 - (keys.topk(count, dim=-1, sorted=True).values & 0xFFFFFFFF)


def join(pieces: list[Logprobs]) -> Logprobs:
    """Concatenates pieces, of which there is at least one."""
    ranks = [piece.ranks for piece in pieces if piece.ranks is not None]
    return Logprobs(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate(ranks) if ranks else None,
    )
