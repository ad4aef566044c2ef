"""The collectives that ranks call within a step."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor.checkpoints.shares import Share


class Communicator(Protocol):
    """The collectives of one rank. All ranks call the same ones in the same order, with as many rows.

    share  the part of the model that this rank holds
    """

    @property
    def share(self) -> Share: ...

    def sum(self, partial: Tensor) -> None:
        """Replaces partial[n, hidden_size] by the sum of all ranks' partials, as `add_in_order` adds them."""
        ...

    def gather(self, own: Tensor, logits: Tensor | None) -> None:
        """Fills logits[n, vocab_size] of rank 0 from each rank's own[n, len(share.vocab)]. None on the other ranks."""
        ...


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of the parts to `out`: in float32, in the order of the ranks, rounded once.

    The order makes each number a function of the parts alone: it is the same on all ranks, and in any batch.
    """
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)
