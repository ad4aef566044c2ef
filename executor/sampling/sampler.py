"""Samples one token from each row of logits.

Order: logit changes (`executor.slots.logit_changes`), minimum length (end ids get -inf), temperature, top-k, top-p,
min-p; then one draw by inverse CDF.

* temperature 0 is greedy: the largest logit, the lowest id among equals
* top-k keeps the k most likely tokens
* top-p (Holtzman et al., 2020) keeps the smallest set of most likely tokens, of those left by top-k, whose share
  reaches p: the token that crosses p is kept
* min-p keeps tokens at least min_p times as likely as the most likely one

"Most likely first" means by logit, then by lower id, so that ties are cut in the same way everywhere. Weights are
float32, and their sums are compared as float32. A row's token depends on that row's logits, parameters and uniform
number alone. Rows that change their logits are copied; all others are sampled in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plans.plan import Ints
from executor.slots.sampling_table import Draw
from kernels import cpu

# Maximum number of logits handled at once: limits the temporaries of large batches to about 100 MB.
_CHUNK = 1 << 23


def sample(logits: Tensor, draw: Draw) -> Ints:
    """Returns token ids[num_rows] sampled from logits[num_rows, vocab_size], which are the same afterwards."""
    if draw.changes is None:
        return _sample(logits, draw, np.True_)
    stays = np.ones(len(logits), dtype=np.bool_)
    stays[draw.changes.rows] = False
    token_ids = _sample(logits, draw, stays) if stays.any() else np.empty(len(logits), dtype=np.int32)
    for part in draw.changes.parts(_CHUNK):
        token_ids[part.rows] = _sample(part.changed(logits), draw.unchanged(part.rows), np.True_)
    return token_ids


def _sample(logits: Tensor, draw: Draw, wanted: NDArray[np.bool_] | np.bool_) -> Ints:
    """Returns token ids[num_rows]: valid for the wanted rows, arbitrary for all others."""
    with _without_banned(logits, draw):
        return _choose(logits, draw, wanted)


@contextmanager
def _without_banned(logits: Tensor, draw: Draw) -> Iterator[None]:
    """Sets banned logits to -inf, and restores them afterwards."""
    places = [(row, torch.from_numpy(token_ids).long().to(logits.device)) for row, token_ids in draw.banned]
    kept = [logits[place] for place in places]
    for place in places:
        logits[place] = -torch.inf
    yield
    for place, values in zip(places, kept, strict=True):
        logits[place] = values


def _choose(logits: Tensor, draw: Draw, wanted: NDArray[np.bool_] | np.bool_) -> Ints:
    if logits.device.type != "cpu":
        logits = logits.cpu()
    if draw.is_greedy:
        likeliest: Ints = logits.float().numpy().argmax(axis=-1).astype(np.int32)  # ten times as fast as torch
        return likeliest
    rows = np.flatnonzero(np.broadcast_to(wanted, len(logits)))
    token_ids = np.empty(len(logits), dtype=np.int32)
    columns: list[Any] = [*draw.params.arrays, draw.uniforms]  # in the order of the parameters of `sample`
    token_ids[rows] = cpu.sample(logits, rows, *columns)
    return token_ids
