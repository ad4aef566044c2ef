"""Log-probabilities of tokens: float32, of one row of logits each.

Rank 1 is the most probable token; lower ids come first among equals. Rows are worked off in pieces, so that temporaries
stay within some 100 MB however large the vocabulary is.
"""

import numpy as np
import torch
from torch import Tensor

from executor.likeliest import likeliest
from executor.plan import Ints, Logprobs

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
    logits = logits.float()
    own_ids = torch.from_numpy(token_ids).to(logits.device).long().unsqueeze(1)
    own = logits.gather(1, own_ids)
    ids = torch.arange(logits.shape[1], device=logits.device)
    num_before = ((logits > own) | ((logits == own) & (ids < own_ids))).sum(dim=-1)
    num_likeliest = int(nums.max()) - 1
    all_ids = torch.cat((own_ids, likeliest(logits, num_likeliest)), dim=1) if num_likeliest else own_ids
    values = torch.log_softmax(logits, dim=-1).gather(1, all_ids)
    ranks = np.broadcast_to(np.arange(num_likeliest + 1, dtype=np.int32), all_ids.shape).copy()
    ranks[:, 0] = num_before.cpu().numpy() + 1
    asked = np.arange(num_likeliest + 1) < nums[:, None]
    return Logprobs(all_ids.cpu().numpy().astype(np.int32)[asked], values.cpu().numpy()[asked], ranks[asked])


def _most_probable(logits: Tensor, nums: Ints) -> Logprobs:
    logits = logits.float()
    ids = likeliest(logits, int(nums.max()))
    values = torch.log_softmax(logits, dim=-1).gather(1, ids)
    asked = np.arange(ids.shape[1]) < nums[:, None]
    return Logprobs(ids.cpu().numpy().astype(np.int32)[asked], values.cpu().numpy()[asked], None)


def join(pieces: list[Logprobs]) -> Logprobs:
    """One after the other; at least one."""
    ranks = [piece.ranks for piece in pieces if piece.ranks is not None]
    return Logprobs(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate(ranks) if ranks else None,
    )
