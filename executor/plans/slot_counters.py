"""The state that a plan is checked against: a few integers for each slot."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Ints


@dataclass(slots=True)
class SlotCounters:
    """One entry for each slot, [max_num_seqs] each; all zero for an empty slot.

        token_ids     ├── num_computed_tokens ──┼── row_count ──┼── … num_tokens
        block table   ├──────── num_blocks entries ─────────┤

    is_admitted              the slot holds a sequence
    has_ended                the executor has ended the sequence; the slot is overrun until it is retired
    is_beam                  the slot reports candidates where others sample
    row_count                number of tokens computed per step
    """

    is_admitted: NDArray[np.bool_]
    has_ended: NDArray[np.bool_]
    is_beam: NDArray[np.bool_]
    num_tokens: Ints
    num_computed_tokens: Ints
    num_blocks: Ints
    row_count: Ints

    @classmethod
    def empty(cls, max_num_seqs: int) -> Self:
        return cls(
            is_admitted=np.zeros(max_num_seqs, dtype=np.bool_),
            has_ended=np.zeros(max_num_seqs, dtype=np.bool_),
            is_beam=np.zeros(max_num_seqs, dtype=np.bool_),
            num_tokens=np.zeros(max_num_seqs, dtype=np.int32),
            num_computed_tokens=np.zeros(max_num_seqs, dtype=np.int32),
            num_blocks=np.zeros(max_num_seqs, dtype=np.int32),
            row_count=np.zeros(max_num_seqs, dtype=np.int32),
        )

    def copy(self) -> "SlotCounters":
        return SlotCounters(*(array.copy() for array in self._arrays()))

    def clear(self, slots: Ints) -> None:
        for array in self._arrays():
            array[slots] = 0

    def copy_slots(self, sources: Ints, destinations: Ints) -> None:
        """Copies all slots at once: a slot may be both a source and a destination."""
        for array in self._arrays():
            array[destinations] = array[sources]

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        """Returns the fields in the order of their declaration."""
        return (
            self.is_admitted,
            self.has_ended,
            self.is_beam,
            self.num_tokens,
            self.num_computed_tokens,
            self.num_blocks,
            self.row_count,
        )

    @property
    def has_reported(self) -> NDArray[np.bool_]:
        """Returns which slots are beams that wait for the scheduler to choose their next token."""
        has_reported: NDArray[np.bool_] = self.is_beam & (self.num_computed_tokens == self.num_tokens)
        return has_reported

    @property
    def num_planned_tokens(self) -> Ints:
        """Returns how many tokens of each slot have their KV in the pool once this step is done."""
        return self.num_computed_tokens + self.row_count
