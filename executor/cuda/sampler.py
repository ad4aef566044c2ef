"""Sampling on the device: the tokens that `executor.sampler` would choose, without a look at any number on the way.

Which of the ways a row takes is known on the host, by its parameters; so rows are sorted into groups there, and every
shape is fixed before the first launch::

    banned     end ids get -inf: the sequence is too short to end
    greedy     all rows, at once
    plain      rows with a temperature and no cut          the cumulative weights run over the ids
    top k      rows with top-k                             as many candidates as the greatest k, rounded up
    top p      rows with top-p alone                       how many candidates reach p, nobody knows: all are sorted

A parameter more is a group more, or a column of `Cut`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.device_slots import DeviceSlots, SamplingField
from executor.cuda.upload import Arrays
from executor.likeliest import likeliest
from executor.sampling_table import Draw
from kernels.triton import choose_greedily

# Numbers handled at once: bounds the temporaries of large batches over large vocabularies to some 300 MB.
MAX_NUMBERS = 1 << 23
_FEWEST_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of a step are sampled: indices of rows for each group, and how many candidates top-k needs."""

    is_greedy: bool
    banned: NDArray[np.int64]
    plain: NDArray[np.int64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.int64]
    num_candidates: int
    uniforms: NDArray[np.float32]

    @classmethod
    def of(cls, draw: Draw) -> "Recipe":
        samples = draw.temperatures != 0
        has_top_k = samples & (draw.top_ks > 0)
        has_top_p = samples & ~has_top_k & (draw.top_ps < 1)
        greatest_k = int(draw.top_ks[has_top_k].max(initial=_FEWEST_CANDIDATES))
        return cls(
            is_greedy=not samples.any(),
            banned=np.array([row for row, _ in draw.banned], dtype=np.int64),
            plain=np.flatnonzero(samples & ~has_top_k & ~has_top_p),
            top_k=np.flatnonzero(has_top_k),
            top_p=np.flatnonzero(has_top_p),
            # Few different shapes: the device has few variants to keep ready.
            num_candidates=1 << (greatest_k - 1).bit_length(),
            uniforms=draw.uniforms,
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the largest logit of each row is asked for."""
        return self.is_greedy and not self.banned.size

    def arrays(self) -> Arrays:
        """What the device has to be sent, and `sample` to be given back as tensors."""
        arrays: Arrays = {
            name: rows
            for name, rows in (
                ("banned", self.banned),
                ("plain", self.plain),
                ("top_k", self.top_k),
                ("top_p", self.top_p),
            )
            if rows.size
        }
        if not self.is_greedy:
            arrays["uniforms"] = self.uniforms
        return arrays


def sample(
    logits: Tensor, slots: Tensor, on_device: DeviceSlots, recipe: Recipe, sent: dict[str, Tensor], token_ids: Tensor
) -> None:
    """logits[R, vocab_size] of slots[R] int32 → token_ids[R] int32. Mutates token_ids, and banned logits.

    Launches a number of kernels that depends on the recipe and on R, and waits for none of them.
    """
    if recipe.banned.size:
        _ban(logits, slots, on_device, sent["banned"])
    choose_greedily(logits, token_ids)
    if recipe.is_greedy:
        return
    num_candidates = min(recipe.num_candidates, logits.shape[1])
    for name, choose in (
        ("plain", _choose_among_all),
        ("top_k", lambda some, cut: _choose_among_the_likeliest(some, cut, num_candidates)),
        ("top_p", _choose_among_the_sorted),
    ):
        if name not in sent:
            continue
        for rows in torch.split(sent[name], max(1, MAX_NUMBERS // logits.shape[1])):
            cut = _cut(on_device.states, slots.index_select(0, rows), sent["uniforms"].index_select(0, rows))
            chosen = choose(logits.index_select(0, rows), cut)
            token_ids.index_copy_(0, rows, chosen.to(torch.int32))


def _ban(logits: Tensor, slots: Tensor, on_device: DeviceSlots, rows: Tensor) -> None:
    """-inf for all tokens that would end these rows."""
    for some in torch.split(rows, max(1, MAX_NUMBERS // logits.shape[1])):
        ends = on_device.end_kinds.index_select(0, slots.index_select(0, some)) != 0
        logits.index_copy_(0, some, logits.index_select(0, some).masked_fill(ends, -torch.inf))


@dataclass(frozen=True, slots=True)
class Cut:
    """The parameters of some rows, as columns [rows, 1] on the device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def _cut(states: Tensor, slots: Tensor, uniforms: Tensor) -> Cut:
    own = states.index_select(0, slots)

    def floats(field: SamplingField) -> Tensor:
        return own[:, field : field + 1].contiguous().view(torch.float32)

    return Cut(
        temperature=floats(SamplingField.TEMPERATURE),
        top_k=own[:, SamplingField.TOP_K : SamplingField.TOP_K + 1],
        top_p=floats(SamplingField.TOP_P),
        min_p=floats(SamplingField.MIN_P),
        uniform=uniforms.unsqueeze(1),
    )


def _choose_among_all(logits: Tensor, cut: Cut) -> Tensor:
    """No order needed: the cumulative weights run over the ids."""
    weights = _weigh(logits, logits.amax(dim=-1, keepdim=True), cut)
    weights = weights.masked_fill_(weights < cut.min_p, 0.0)
    cumulative = weights.cumsum(dim=-1)
    return _invert(cumulative, cumulative[:, -1:], cut)


def _choose_among_the_likeliest(logits: Tensor, cut: Cut, num_candidates: int) -> Tensor:
    """Rows with top-k, each at most num_candidates."""
    ids = likeliest(logits, num_candidates)
    weights = _weigh(logits.gather(1, ids), logits.amax(dim=-1, keepdim=True), cut)
    ranks = torch.arange(num_candidates, device=logits.device)
    weights = weights.masked_fill_(ranks >= cut.top_k, 0.0)
    cumulative = weights.cumsum(dim=-1)
    return _picked(ids, weights, cumulative, cumulative[:, -1:], cut)


def _choose_among_the_sorted(logits: Tensor, cut: Cut) -> Tensor:
    """Rows with top-p and no top-k."""
    # Adding zero turns -0.0 into 0.0: equal logits must have equal bits.
    ordered, ids = torch.sort(logits.float() + 0.0, dim=-1, descending=True, stable=True)
    peaks = ordered[:, :1]
    weights = _weigh(ordered, peaks, cut)
    total = _weigh(logits, peaks, cut).sum(dim=-1, keepdim=True)
    return _picked(ids, weights, weights.cumsum(dim=-1), total, cut)


def _picked(ids: Tensor, weights: Tensor, cumulative: Tensor, total: Tensor, cut: Cut) -> Tensor:
    picks = _invert(cumulative, _mass_kept(weights, cumulative, total, cut), cut)
    return ids.gather(1, picks.unsqueeze(1)).squeeze(1)


def _mass_kept(weights: Tensor, cumulative: Tensor, total: Tensor, cut: Cut) -> Tensor:
    """Cumulative weight [rows, 1] of the candidates that stay. Weights descend, so those are the first few.

    weights     ▇ ▆ ▅ ▃ ▂ ▁ 0 0          zero beyond top_k
    before      0 ▇ …                    the cumulative weight without the candidate itself
    top_p       before < top_p * total   keeps the candidate that crosses
    """
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    in_top_p = (before < cut.top_p * total) | (cut.top_p >= 1)
    stays = in_top_p & (weights >= cut.min_p)
    num_kept = stays.sum(dim=-1, keepdim=True).clamp(min=1)
    return cumulative.gather(1, num_kept - 1)


def _invert(cumulative: Tensor, mass: Tensor, cut: Cut) -> Tensor:
    """The first index [rows] whose cumulative weight exceeds the uniform's share of the mass."""
    picks = torch.searchsorted(cumulative, cut.uniform * mass, right=True).squeeze(1)
    return picks.clamp_(max=cumulative.shape[1] - 1)


def _weigh(logits: Tensor, peaks: Tensor, cut: Cut) -> Tensor:
    """exp((logit - peak) / temperature) [rows, n]: 1 for the likeliest token, and never an overflow."""
    finite_peaks = peaks.float().clamp(min=torch.finfo(torch.float32).min)
    return logits.float().sub(finite_peaks).div_(cut.temperature).exp_()
