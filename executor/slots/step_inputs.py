"""The one description of a step that all runners share: the rows it computes, and the logits it makes of them.

    rows        │ d │ d │ d │ p  p  p  p │ p  p │      one for each token
    sequences   └ decodes ──┴ prefills ─────────┘      a decode is a sequence with one row

    logits      │ sampling slots │ beams │ prompts │   one for each of `logit_rows`

Attention may treat decodes and prefills differently; all other layers see rows only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Fork, Ints
from executor.slots.slots import Slots


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of T rows of S sequences, as the host knows it before the step computes.

    slots[S]            slots that compute tokens: the num_decodes that have one row, then the others
    row_counts[S]       number of rows of each slot
    query_starts[S + 1] slots[s] owns the rows [query_starts[s], query_starts[s + 1])
    context_lens[S]     tokens that each slot attends to, those of this step included
    logit_rows[L]       int64, the rows that logits are made of: the last row of each slot that samples, by ascending
                        slot; the last row of each beam; the rows of `Slots.prompt_spans`
    num_sampled_logits  how many of the logits belong to slots that sample
    reporting           slots that have an entry in the result, ascending: those that sample, children, overrun slots
    sampling[R]         slots that sample a token: in the order of their logits, and then the forked children
    sampled_logits[R]   int64, the logits that each samples from; a child uses those of its parent
    beams[B]            slots that report candidates, ascending
    has_forks           the plan forks slots, even if only ended ones
    is_synchronous      logits are changed, or something besides tokens is reported; see `Slots.is_synchronous`
    """

    slots: Ints
    num_decodes: int
    row_counts: Ints
    query_starts: Ints
    context_lens: Ints
    logit_rows: NDArray[np.int64]
    num_sampled_logits: int
    reporting: Ints
    sampling: Ints
    sampled_logits: NDArray[np.int64]
    beams: Ints
    has_forks: bool
    is_synchronous: bool

    @property
    def num_rows(self) -> int:
        return int(self.query_starts[-1])

    @property
    def is_decode_only(self) -> bool:
        """True if each row computes a slot's last token and samples for that slot alone."""
        return 0 < self.num_decodes == len(self.slots) == len(self.sampling) and not self.has_forks

    @property
    def first_prompt_logit(self) -> int:
        """Index of the first of the logits that belong to `Slots.prompt_spans`."""
        return self.num_sampled_logits + len(self.beams)

    @property
    def row_slots(self) -> Ints:
        """Returns the slot of each row: [T]."""
        row_slots: Ints = self.slots
        return row_slots if self.num_decodes == len(self.slots) else np.repeat(row_slots, self.row_counts)

    @property
    def positions(self) -> Ints:
        """Returns the position of each row's token in its sequence: [T]."""
        first_positions: Ints = self.context_lens - self.row_counts
        if self.num_decodes == len(self.slots):
            return first_positions
        offsets = np.repeat(first_positions - self.query_starts[:-1], self.row_counts)
        positions: Ints = offsets + np.arange(self.num_rows, dtype=np.int32)
        return positions


def begin_step(slots: Slots, forks: tuple[Fork, ...]) -> StepInputs:
    """Returns the step of slots to which its plan was applied, and moves the slots past it.

    Mutates the slots: they have advanced and forked, but their sampled tokens are still to be appended.
    """
    counters, own, beams = slots.counters, slots.sampling, slots.beams
    computing, num_decodes = _decodes_first(slots)
    row_counts = counters.row_count[computing]
    query_starts = np.zeros(len(computing) + 1, dtype=np.int32)
    np.cumsum(row_counts, out=query_starts[1:])
    context_lens = counters.num_planned_tokens[computing]
    last_rows = np.zeros(slots.limits.max_num_seqs, dtype=np.int64)
    last_rows[computing] = query_starts[1:] - 1
    logit_rows = np.concatenate((last_rows[own], last_rows[beams], _prompt_rows(slots, last_rows)))
    children = np.array([fork.child_slot for fork in forks], dtype=np.int32)
    is_synchronous = slots.is_synchronous

    slots.advance()
    slots.fork(forks)
    sampling, sampled_logits = own, np.arange(len(own), dtype=np.int64)
    if forks:
        is_live = ~counters.has_ended[children]
        logit_of = np.zeros(slots.limits.max_num_seqs, dtype=np.int64)
        logit_of[own] = sampled_logits
        parents = np.array([fork.parent_slot for fork in forks], dtype=np.int32)
        sampling = np.concatenate((own, children[is_live]))
        sampled_logits = np.concatenate((sampled_logits, logit_of[parents[is_live]]))
    return StepInputs(
        slots=computing,
        num_decodes=num_decodes,
        row_counts=row_counts,
        query_starts=query_starts,
        context_lens=context_lens,
        logit_rows=logit_rows,
        num_sampled_logits=len(own),
        reporting=np.sort(np.concatenate((own, slots.overrun, children))),
        sampling=sampling,
        sampled_logits=sampled_logits,
        beams=beams,
        has_forks=bool(forks),
        is_synchronous=is_synchronous,
    )


def _decodes_first(slots: Slots) -> tuple[Ints, int]:
    """Returns the slots that compute, in the order of their rows, and how many of them are decodes."""
    computing = slots.computing
    is_decode = slots.counters.row_count[computing] == 1
    num_decodes = int(np.count_nonzero(is_decode))
    if num_decodes < len(computing):
        computing = np.concatenate((computing[is_decode], computing[~is_decode]))
    return computing, num_decodes


def _prompt_rows(slots: Slots, last_rows: NDArray[np.int64]) -> Ints:
    """Returns the rows of `Slots.prompt_spans`."""
    if (spans := slots.prompt_spans) is None:
        return np.zeros(0, dtype=np.int32)
    first_rows = last_rows[spans.slots] + 1 - slots.counters.row_count[spans.slots]
    return spans.following(first_rows.astype(np.int32))
