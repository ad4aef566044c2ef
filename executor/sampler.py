"""From logits to one token a row.

Order: what sequences change (see `executor.logit_changes`), minimum length (end ids get -inf), temperature, top-k,
top-p, min-p; then one draw by inverse CDF.

* temperature 0 is greedy: the largest logit, the lowest id among equals
* top-k keeps the k most likely tokens
* top-p (Holtzman et al., 2020) keeps the smallest set of most likely tokens, of those left by top-k, whose share
  reaches p: the token that crosses p is kept
* min-p keeps tokens at least min_p times as likely as the most likely one

"Most likely first" is ordered by logit, then by lower id, so that ties are cut in one way everywhere.
All of it is float32. A row's token depends on that row's logits, parameters and uniform number alone. Rows that change
logits are taken apart; all others are looked at where they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plan import Ints
from executor.sampling_table import Draw

# Candidates that are sorted at first for a row without top-k; nearly always they reach top_p.
_FIRST_CANDIDATES = 256
_MORE_CANDIDATES = 16
# Numbers handled at once: bounds the temporaries of large batches over large vocabularies to some 100 MB.
_CHUNK = 1 << 23


def sample(logits: Tensor, draw: Draw) -> Ints:
    """logits[num_rows, vocab_size] → token ids[num_rows]. Leaves the logits as they were."""
    if draw.changes is None:
        return _sample(logits, draw, np.True_)
    stays = np.ones(len(logits), dtype=np.bool_)
    stays[draw.changes.rows] = False
    token_ids = _sample(logits, draw, stays) if stays.any() else np.empty(len(logits), dtype=np.int32)
    for part in draw.changes.parts(_CHUNK):
        token_ids[part.rows] = _sample(part.changed(logits), draw.unchanged(part.rows), np.True_)
    return token_ids


def _sample(logits: Tensor, draw: Draw, wanted: NDArray[np.bool_] | np.bool_) -> Ints:
    """Token ids[num_rows] of the rows that are wanted, anything for others."""
    if not draw.banned:
        return _choose(logits, draw, wanted)
    with _without_banned(logits, draw):
        return _choose(logits, draw, wanted)


@contextmanager
def _without_banned(logits: Tensor, draw: Draw) -> Iterator[None]:
    """Banned logits are -inf for a while."""
    places = [(row, torch.from_numpy(token_ids).long().to(logits.device)) for row, token_ids in draw.banned]
    kept = [logits[place] for place in places]
    for place in places:
        logits[place] = -torch.inf
    yield
    for place, values in zip(places, kept, strict=True):
        logits[place] = values


def _choose(logits: Tensor, draw: Draw, wanted: NDArray[np.bool_] | np.bool_) -> Ints:
    if draw.is_greedy:
        return _host(_argmax(logits))
    token_ids = np.empty(len(logits), dtype=np.int32)
    is_greedy = draw.temperatures == 0
    is_cut = ~is_greedy & ((draw.top_ks > 0) | (draw.top_ps < 1))
    for rows, choose in (
        (is_greedy & wanted, _choose_greedily),
        (is_cut & wanted, _choose_among_the_likeliest),
        (~is_greedy & ~is_cut & wanted, choose_among_all),
    ):
        indices = np.flatnonzero(rows)
        for chunk in np.array_split(indices, -(-indices.size * logits.shape[1] // _CHUNK) or 1):
            if chunk.size:
                where = torch.from_numpy(chunk).to(logits.device)
                token_ids[chunk] = _host(choose(_take(logits, where), Cut.of(draw, chunk, logits.device)))
    return token_ids


@dataclass(frozen=True, slots=True)
class Cut:
    """The parameters of some rows, as columns [rows, 1] on the device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, draw: Draw, rows: np.ndarray, device: torch.device) -> Self:
        columns = (draw.temperatures, draw.top_ks, draw.top_ps, draw.min_ps, draw.uniforms)
        return cls(*(torch.from_numpy(column[rows]).unsqueeze(1).to(device) for column in columns))

    def only(self, rows: Tensor) -> "Cut":
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return Cut(*(column[rows] for column in columns))


def _choose_greedily(logits: Tensor, cut: Cut) -> Tensor:
    return _argmax(logits)


def choose_among_all(logits: Tensor, cut: Cut) -> Tensor:
    """No order needed: the cumulative weights run over the ids."""
    weights = weigh(logits, logits.amax(dim=-1, keepdim=True), cut)
    weights = weights.masked_fill_(weights < cut.min_p, 0.0)
    cumulative = weights.cumsum(dim=-1)
    return invert(cumulative, cumulative[:, -1:], cut)


def _choose_among_the_likeliest(logits: Tensor, cut: Cut) -> Tensor:
    """Sorts as many candidates as the cuts need, not the vocabulary."""
    vocab_size = logits.shape[1]
    peaks = logits.amax(dim=-1, keepdim=True)
    # Rows with top-k get their total from the candidates; if all have it, nobody looks at these.
    needs_totals = bool((cut.top_k == 0).any())
    totals = weigh(logits, peaks, cut).sum(dim=-1, keepdim=True) if needs_totals else peaks
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    pending = torch.arange(len(logits), device=logits.device)
    num_candidates = min(vocab_size, max(_FIRST_CANDIDATES, int(cut.top_k.max())))
    while len(pending):
        some, some_logits = cut.only(pending), _take(logits, pending)
        ids = likeliest(some_logits, num_candidates)
        weights = weigh(some_logits.gather(1, ids), peaks[pending], some)
        ranks = torch.arange(num_candidates, device=logits.device)
        weights = weights.masked_fill_((some.top_k > 0) & (ranks >= some.top_k), 0.0)
        cumulative = weights.cumsum(dim=-1)
        total = torch.where(some.top_k > 0, cumulative[:, -1:], totals[pending])
        is_enough = (some.top_k > 0) | (cumulative[:, -1:] >= some.top_p * total)
        done = is_enough.squeeze(1) | (num_candidates == vocab_size)
        kept = mass_kept(weights, cumulative, total, some)
        picks = ids.gather(1, invert(cumulative, kept, some).unsqueeze(1)).squeeze(1)
        chosen[pending[done]] = picks[done]
        pending = pending[~done]
        num_candidates = min(vocab_size, num_candidates * _MORE_CANDIDATES)
    return chosen


def mass_kept(weights: Tensor, cumulative: Tensor, total: Tensor, cut: Cut) -> Tensor:
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


def invert(cumulative: Tensor, mass: Tensor, cut: Cut) -> Tensor:
    """The first index [rows] whose cumulative weight exceeds the uniform's share of the mass."""
    picks = torch.searchsorted(cumulative, cut.uniform * mass, right=True).squeeze(1)
    return picks.clamp_(max=cumulative.shape[1] - 1)


def weigh(logits: Tensor, peaks: Tensor, cut: Cut) -> Tensor:
    """exp((logit - peak) / temperature) [rows, n]: 1 for the likeliest token, and never an overflow."""
    finite_peaks = peaks.float().clamp(min=torch.finfo(torch.float32).min)
    return logits.float().sub(finite_peaks).div_(cut.temperature).exp_()


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
    return vocab_size - 1 - (_largest(keys, count) & 0xFFFFFFFF)


def _largest(keys: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of distinct keys, in descending order."""
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1, sorted=True).values
    # numpy selects and sorts integers with vector instructions: here 4 (all) to 20 times (few) as fast as torch.
    num_rest = keys.shape[1] - count
    top = np.partition(keys.numpy(), num_rest, axis=-1)[:, num_rest:] if num_rest else keys.numpy()
    return torch.from_numpy(np.sort(top, axis=-1)[:, ::-1].copy())


def _argmax(logits: Tensor) -> Tensor:
    """The lowest id of the largest logit."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # As in `_largest`: about ten times as fast as torch.
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    """These rows, ascending; no copy if they are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _host(token_ids: Tensor) -> Ints:
    host: Ints = token_ids.cpu().numpy().astype(np.int32)
    return host
