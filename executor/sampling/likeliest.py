"""The largest logits of each row, in one order everywhere: by logit, then by lower id."""

import torch
from torch import Tensor


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids [rows, count] of the largest logits, largest first, lower ids first among equals.

    Each (logit, id) becomes one integer whose order is the wanted one: the bits of a float32, sign-folded so that they
    order as the numbers do, above the complement of the id.
    """
    vocab_size = logits.shape[1]
    # Adding zero turns -0.0 into 0.0: equal logits must have equal bits.
    bits = (logits.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    complements = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | complements
    return vocab_size - 1 - (keys.topk(count, dim=-1, sorted=True).values & 0xFFFFFFFF)
