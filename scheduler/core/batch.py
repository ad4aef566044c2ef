"""The running batch: who has which slot, and what each is about to do."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core.beam_group import BeamGroup
    from scheduler.core.sequence import Sequence


class Batch:
    """The sequences that hold blocks:

        running = prefilling (lack more than one token) + decoding (lack one) + ending (lack only a result) + beams

    A slot is a seat in the executor's batch. The lowest free one is given out first, so that slots stay dense.
    An ending sequence has given its slot up already: the plan that carries its last row is out. Beams are planned
    once they are decided, and then wait for candidates.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.running: dict[Sequence, None] = {}  # an ordered set
        self.prefilling: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []  # by slot
        self.joined: list[Sequence] = []  # decode since the last plan: the executor may have to hear of it
        self.decided: list[BeamGroup] = []  # whose beams have each a token to compute
        self.num_reporting = 0  # running ones whose tokens come with log-probabilities
        self.retired_slots: list[int] = []  # the executor will hear of it with the next plan
        self._free_slots = list(range(max_num_seqs))  # a heap

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def hold_slot(self) -> int:
        return heappop(self._free_slots)

    def return_slot(self, slot: int) -> None:
        """A slot that the executor never saw filled."""
        heappush(self._free_slots, slot)

    def enter(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        self.running[sequence] = None
        self.num_reporting += sequence.params.num_logprobs > 0

    def start_decoding(self, sequence: Sequence) -> None:
        insort(self.decoding, sequence, key=by_slot)
        self.joined.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Gives the slot up. The executor hears of it with the next plan, before anybody else can take the slot."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        elif not sequence.is_beam:
            del self.decoding[bisect_left(self.decoding, sequence.slot, key=by_slot)]
        self.retired_slots.append(sequence.slot)
        heappush(self._free_slots, sequence.slot)
        sequence.slot = -1

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        """The heir has taken over the slot."""
        del self.running[sequence]
        self.running[heir] = None

    def vacate(self, sequence: Sequence) -> int:
        """Out of the batch; the executor hears of it with the next plan, the slot stays held. Returns it."""
        del self.running[sequence]
        self.retired_slots.append(sequence.slot)
        return sequence.slot

    def drop(self, sequence: Sequence) -> None:
        """Out of the batch, slot and all."""
        del self.running[sequence]
        self.num_reporting -= sequence.params.num_logprobs > 0
        if sequence.slot >= 0:
            self.retire(sequence)


def by_slot(sequence: Sequence) -> int:
    return sequence.slot
