"""The reports that each slot asks for besides its tokens."""

from dataclasses import dataclass

import numpy as np

from executor.plans.plan import Ints, SequenceParams
from executor.plans.slot_counters import SlotCounters


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Rows of a step that are followed by a prompt token whose log-probability is to be reported.

    By ascending slot: slots[n], first_positions[n] of their rows, counts[n].
    """

    slots: Ints
    first_positions: Ints
    counts: Ints

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @property
    def row_slots(self) -> Ints:
        """Returns the slot of each row: [num_rows]."""
        row_slots: Ints = np.repeat(self.slots, self.counts)
        return row_slots

    def following(self, starts: Ints) -> Ints:
        """Returns starts[n], starts[n] + 1, … for each slot: [num_rows]."""
        ends = np.cumsum(self.counts)
        own = np.arange(ends[-1]) - np.repeat(ends - self.counts, self.counts)
        numbers: Ints = (np.repeat(starts, self.counts) + own).astype(np.int32)
        return numbers


class ReportTable:
    """The report parameters of `SequenceParams`, [max_num_seqs] each.

    has_logprobs, has_prompt_logprobs and has_beams: whether any slot asks for such a report. Usually none does, and
    then a step reads nothing else of this table.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.has_logprobs = self.has_prompt_logprobs = self.has_beams = False
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_candidates = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)

    def set(self, slot: int, params: SequenceParams) -> None:
        self.num_logprobs[slot] = params.num_logprobs
        self.num_prompt_logprobs[slot] = params.num_prompt_logprobs
        self.num_candidates[slot] = params.num_candidates
        self._num_prompt_tokens[slot] = params.num_prompt_tokens
        self._update_flags()

    def drop(self, slots: Ints) -> None:
        """Forgets slots that are empty now."""
        if slots.size:
            for array in self._arrays():
                array[slots] = 0
            self._update_flags()

    def clear(self) -> None:
        """Forgets all slots."""
        for array in self._arrays():
            array[:] = 0
        self._update_flags()

    def copy_slots(self, sources: Ints, destinations: Ints) -> None:
        for array in self._arrays():
            array[destinations] = array[sources]
        self._update_flags()

    def prompt_spans(self, computing: Ints, counters: SlotCounters) -> PromptSpans | None:
        """Returns the rows to report on among the slots that compute in this step; None if there are none."""
        if not self.has_prompt_logprobs:
            return None
        slots = computing[self.num_prompt_logprobs[computing] > 0]
        if not slots.size:
            return None
        first_positions = counters.num_computed_tokens[slots]
        # The token after the prompt's last row is output, which is not reported here.
        counts = np.minimum(counters.row_count[slots], self._num_prompt_tokens[slots] - 1 - first_positions)
        has_any = counts > 0
        if not has_any.any():
            return None
        return PromptSpans(slots[has_any], first_positions[has_any], counts[has_any])

    def _update_flags(self) -> None:
        self.has_logprobs = bool(self.num_logprobs.any())
        self.has_prompt_logprobs = bool(self.num_prompt_logprobs.any())
        self.has_beams = bool(self.num_candidates.any())

    def _arrays(self) -> tuple[Ints, ...]:
        return self.num_logprobs, self.num_prompt_logprobs, self.num_candidates, self._num_prompt_tokens
