"""The reports of a step besides its tokens, from the logits as the model made them.

The log-probabilities of a beam or a prompt token are NaN if its row of logits is not finite, and never otherwise: the
scheduler then fails the request. Those of a beam are infinity if the step did not wait for its mask.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plans.plan import Ints, Logprobs
from executor.sampling.finite import finite_rows
from executor.sampling.logprobs import join, most_probable, row_pieces, score
from executor.slots.sampling_table import Draw
from executor.slots.slots import Slots


def report_tokens(slots: Slots, sampling: Ints, logits: Tensor, token_ids: Ints) -> Logprobs | None:
    """Reports the tokens that slots have sampled from logits[len(sampling), vocab_size], by ascending slot."""
    if not slots.reports.has_logprobs:
        return None
    nums = slots.reports.num_logprobs[sampling]
    wanting = np.flatnonzero(nums)
    if not wanting.size:
        return None
    rows = wanting[np.argsort(sampling[wanting])]
    return score(logits[torch.from_numpy(rows).to(logits.device)], token_ids[rows], nums[rows])


def with_overrun(slots: Slots, reporting: Ints, is_live: np.ndarray, logprobs: Logprobs | None) -> Logprobs | None:
    """Returns the log-probabilities of reporting[is_live] with room for the other slots, which had ended.

    The entries of ended slots are meaningless, like their tokens. The scheduler expects them, because it did not know
    that the sequences had ended when it made the plan.
    """
    if not slots.reports.has_logprobs:
        return logprobs
    nums = slots.reports.num_logprobs[reporting]
    if not nums[~is_live].any():
        return logprobs
    num_entries = int(nums.sum())
    token_ids, values = np.zeros(num_entries, np.int32), np.zeros(num_entries, np.float32)
    ranks = np.ones(num_entries, np.int32)
    if logprobs is not None and logprobs.ranks is not None:
        is_known = np.repeat(is_live, nums)
        token_ids[is_known], values[is_known], ranks[is_known] = logprobs.token_ids, logprobs.values, logprobs.ranks
    return Logprobs(token_ids, values, ranks)


def report_prompts(slots: Slots, logits: Tensor, rows: slice | None = None) -> Logprobs | None:
    """Reports prompt tokens from the logits of the rows of `slots.prompt_spans`; rows: the slice of them to report."""
    spans = slots.prompt_spans
    if spans is None:
        return None
    row_slots = spans.row_slots
    targets = slots.token_ids[row_slots, spans.following(spans.first_positions + 1)]
    rows = rows or slice(0, len(targets))
    nums = slots.reports.num_prompt_logprobs[row_slots][rows]
    is_finite, usable = _usable(logits)
    return _marked(score(usable, targets[rows], nums), nums, is_finite)


def report_candidates(slots: Slots, beams: Ints, logits: Tensor) -> Logprobs | None:
    """Reports the most probable next tokens of beams from logits[len(beams), vocab_size]."""
    if not beams.size:
        return None
    pieces = []
    for rows in row_pieces(*logits.shape):
        nums = slots.reports.num_candidates[beams[rows]]
        is_finite, usable = _usable(logits[rows])
        candidates = most_probable(_changed(usable, slots.draw(beams[rows])), nums)
        pieces.append(_marked(candidates, nums, is_finite))
    joined = join(pieces)
    is_late = np.repeat(slots.repeat_late(beams), slots.reports.num_candidates[beams])
    joined.values[is_late & ~np.isnan(joined.values)] = np.inf
    return joined


def _usable(logits: Tensor) -> tuple[NDArray[np.bool_], Tensor]:
    """Returns which rows are finite, and the logits with zeros in all others: kernels that rank expect numbers."""
    is_finite = finite_rows(logits)
    if is_finite.all():
        return is_finite, logits
    return is_finite, logits.masked_fill(torch.from_numpy(~is_finite).to(logits.device).unsqueeze(1), 0)


def _marked(logprobs: Logprobs, nums: Ints, is_finite: NDArray[np.bool_]) -> Logprobs:
    """Returns the log-probabilities of rows with nums[row] entries: NaN for rows that are not finite, and for no other.

    A finite row whose tokens are all forbidden has no probabilities: it gets -inf.
    """
    values = np.nan_to_num(logprobs.values, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    values[np.repeat(~is_finite, nums)] = np.nan
    return replace(logprobs, values=values)


def _changed(logits: Tensor, draw: Draw) -> Tensor:
    """Returns a new tensor with all changes to logits that come before the temperature."""
    changed = logits.to(torch.float32, copy=True)
    if draw.changes is not None:
        rows = torch.from_numpy(draw.changes.rows).to(logits.device).long()
        changed[rows] = draw.changes.changed(logits)
        if draw.changes.masks is not None:
            failed = torch.from_numpy(draw.changes.masks.failed()).to(logits.device)
            changed[rows[failed]] = -torch.inf  # without candidates, the scheduler ends the search
    for row, token_ids in draw.banned:
        changed[row, torch.from_numpy(token_ids).to(logits.device).long()] = -torch.inf
    return changed
