"""The definition of drawing a token, in float64; the sampling kernels are tested against it."""

from __future__ import annotations

import numpy as np
import torch

UNIFORMS = (0.0, 1e-7, 0.25, 0.5, 0.75, 0.999, 1 - 2**-24)
ROUNDING = 1e-5
"""Relative rounding error of float32 sums of up to 6,000 weights."""


def logits_of(kind: str, num_rows: int, size: int) -> torch.Tensor:
    """Returns random logits[num_rows, size] of a kind that is difficult in some way."""
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * 3
    match kind:
        case "ties":
            return logits.div(2).round()
        case "flat":
            return torch.where(logits > 0, 0.0, -0.0)
        case "one peak":  # all other logits are beyond the last bucket
            logits[:, size // 2] += 500
            return logits
        case "holes":
            return logits.masked_fill(logits < 0, -torch.inf).index_fill(1, torch.tensor([0]), 0.0)
        case "wide":
            return logits * 1e30
        case _:
            return logits


class Row:
    """One row of logits: its weights, the tokens that the cuts keep, and their cumulative weights.

    All numbers are float64; each bound leaves room for the rounding errors of float32.
    """

    def __init__(self, logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        self.weights = np.exp((logits - logits.max()) / temperature)
        self.is_cut = top_k > 0 or top_p < 1
        ids = np.arange(len(logits))
        self.order = np.lexsort((ids, -logits)) if self.is_cut else ids
        ordered = self.weights[self.order]
        in_top_k = ids < (top_k or len(ids)) if self.is_cut else np.ones(len(ids), bool)
        before = np.cumsum(ordered) - ordered
        total = ordered[in_top_k].sum()
        first = ids == 0 if self.is_cut else ordered == 1.0

        def kept(room: float) -> np.ndarray:
            in_top_p = (before < top_p * total * (1 + room)) | (top_p >= 1)
            return (in_top_k & in_top_p & (ordered >= min_p * (1 - room))) | first

        self.may_stay = kept(ROUNDING)
        self.must_stay = kept(-ROUNDING)
        self.cumulative = np.cumsum(np.where(self.may_stay, ordered, 0.0))
        self.ordered = ordered

    def check(self, chosen: int, uniform: float) -> None:
        """Checks that the chosen token is one that the uniform may select."""
        rank = int(np.flatnonzero(self.order == chosen)[0])
        assert self.may_stay[rank], "a token that was cut off"
        most = self.cumulative[-1]
        least = self.ordered[self.must_stay].sum()
        upper = self.cumulative[rank] * (1 + ROUNDING)
        lower = (self.cumulative[rank] - self.ordered[rank]) * (1 - ROUNDING) - (most - least)
        assert upper >= uniform * least * (1 - ROUNDING)
        assert lower <= uniform * most * (1 + ROUNDING) + ROUNDING
