"""The collectives of ranks on CPUs, by gloo (torch.distributed): over the loopback interface, or between machines.

A sum is a gathering of all parts, which each rank then adds by itself: gloo's own reduction of more than two ranks need
not add in the order of the ranks.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from executor.checkpoints.shares import Share, Span
from executor.errors import RankLost
from executor.models.communicator import add_in_order
from executor.parallel.rendezvous import AddressStore

LOOPBACK = "127.0.0.1"

R = TypeVar("R")

dist: Any = distributed  # few of its functions have type annotations


class GlooCommunicator:
    """Implements `executor.models.communicator.Communicator`."""

    def __init__(self, share: Share, store: AddressStore, vocab_size: int, timeout_s: float, host: str) -> None:
        """Waits until all ranks have called this. Raises RankLost, and the errors of the store's exchange.

        host  the address of this machine, at which the other ranks reach this one
        """
        self.share = share
        self._vocab = [Span.part(vocab_size, rank, share.size) for rank in range(share.size)]
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        self._to_leader = dist.GatherOptions()
        self._to_leader.rootRank = 0
        try:
            self._group = self._met(lambda: dist.ProcessGroupGloo(store, share.rank, share.size, options))
        except Exception:
            if store.problem is not None:
                raise store.problem from None
            raise

    def sum(self, partial: Tensor) -> None:
        """See `Communicator`. All ranks send their part to all others."""
        if not len(partial):
            return
        parts = partial.new_empty((self.share.size, *partial.shape))
        self._met(lambda: self._group.allgather([list(parts.unbind())], [partial.contiguous()]).wait())
        add_in_order(parts.unbind(), partial)

    def gather(self, own: Tensor, logits: Tensor | None) -> None:
        """See `Communicator`. Parts are padded to the width of the largest one."""
        if not len(own):
            return
        width = max(map(len, self._vocab))
        padded = own if own.shape[1] == width else torch.nn.functional.pad(own, (0, width - own.shape[1]))
        parts = padded.new_empty((0 if logits is None else self.share.size, *padded.shape))
        targets = [] if logits is None else [list(parts.unbind())]
        self._met(lambda: self._group.gather(targets, [padded.contiguous()], self._to_leader).wait())
        for part, span in zip(parts, self._vocab, strict=False):
            if logits is not None:
                logits[:, span.start : span.stop] = part[:, : len(span)]

    def _met(self, meet: Callable[[], R]) -> R:
        """Returns the result of a collective. Raises RankLost if another rank has ended, or is late."""
        try:
            return meet()
        except RuntimeError as error:  # gloo has no other
            text = str(error).splitlines()[0].rpartition("] ")[2]
            raise RankLost(text.partition(". This is typically")[0]) from None
