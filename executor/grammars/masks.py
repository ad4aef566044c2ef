"""The masks of the rows of a step. They are computed beside the model, and waited for when they are needed."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.grammars.slot_grammar import Patience, SlotGrammar

_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)
"""For each byte of a mask, the bounds of the logits of its eight tokens: infinity if the token may come next."""


@dataclass(slots=True)
class GrammarCounts:
    """Counts for the metrics: grammars that were compiled, nanoseconds for which steps waited for masks, and masks for
    which they did not wait.

    num_compiled is changed under the cache's lock, the others by the device thread alone.
    """

    num_compiled: int = 0
    waited_ns: int = 0
    num_deferred: int = 0


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks for some rows: rows[m] ascending, and the grammar of each."""

    rows: NDArray[np.int64]
    grammars: tuple[SlotGrammar, ...]
    counts: GrammarCounts
    patience: Patience

    def forbid(self, logits: Tensor) -> None:
        """Sets the logits of all tokens that may not come next to -inf. Waits for the masks.

        The rows of deferred sequences stay as they are. Mutates the rows of logits[num_rows, vocab_size].
        """
        if not self.grammars:
            return
        if logits.device.type == "cpu":
            self._forbid_on_cpu(logits.numpy())
            return
        packed = torch.from_numpy(self._packed()).to(logits.device)
        powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
        is_forbidden = (packed.unsqueeze(2) & powers) == 0
        own = is_forbidden.flatten(1)[:, : logits.shape[1]]
        rows = torch.from_numpy(self.rows).to(logits.device)
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(own, -torch.inf))

    def _forbid_on_cpu(self, logits: NDArray[np.float32]) -> None:
        """Does the same without torch, whose threads would have to wait for a core for each of its operations.

        The smaller one of a logit and its bound is the logit, or -inf.
        """
        bounds = _BOUNDS.take(self._packed(), axis=0).reshape(len(self.rows), -1)[:, : logits.shape[1]]
        if len(self.rows) == len(logits):
            np.minimum(logits, bounds, out=logits)
        else:
            logits[self.rows] = np.minimum(logits[self.rows], bounds)

    def failed(self) -> NDArray[np.int64]:
        """Returns the rows whose grammar cannot be followed. All their tokens are allowed, for one to be sampled."""
        has_failed = [each.state(self.patience).run is None for each in self.grammars]
        return self.rows[has_failed]

    def between(self, first: int, last: int) -> "Masks":
        """Returns the masks of the rows [first, last), numbered from 0."""
        start, stop = np.searchsorted(self.rows, (first, last)).tolist()
        return Masks(self.rows[start:stop] - first, self.grammars[start:stop], self.counts, self.patience)

    def _packed(self) -> NDArray[np.uint8]:
        started_ns = time.monotonic_ns()
        # The last one first: once it is there, no other wait gives up this thread's turn with the interpreter.
        masks = [each.state(self.patience).mask for each in reversed(self.grammars)][::-1]
        packed = np.concatenate(masks).reshape(len(masks), -1)
        self.counts.waited_ns += time.monotonic_ns() - started_ns
        return packed
