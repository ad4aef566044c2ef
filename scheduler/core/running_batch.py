"""The running batch: which sequence has which slot, and what each sequence does next."""

from bisect import bisect_left, insort
from heapq import heappop, heappush

from scheduler.core.beams.group import BeamGroup
from scheduler.core.sequence import Sequence


class RunningBatch:
    """The sequences that hold blocks:

        running = prefilling (several tokens to compute) + decoding (one) + ending (only a result to come) + beams

    A slot is a seat in the executor's batch. The lowest free slot is taken first, so that slots stay dense. An ending
    sequence has already given up its slot, because the plan with its last row is in flight. Beams are planned when they
    have been decided, and then wait for candidates.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.running: dict[Sequence, None] = {}  # an ordered set
        self.prefilling: list[Sequence] = []  # in order of admission
        self.decoding: list[Sequence] = []  # by slot
        self.joined: list[Sequence] = []  # started to decode after the last plan; their row count may have to be sent
        self.decided = list[BeamGroup]()  # each beam of these groups has a token to compute
        self.paused = list[BeamGroup]()  # some beams of these groups have their last token to compute again
        self.num_reporting = 0  # running sequences that asked for log-probabilities
        self.retired_slots: list[int] = []  # sent with the next plan
        self._free_slots = list(range(max_num_seqs))  # a heap

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def hold_slot(self) -> int:
        return heappop(self._free_slots)

    def return_slot(self, slot: int) -> None:
        """Frees a slot that no plan has filled."""
        heappush(self._free_slots, slot)

    def enter(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        self.running[sequence] = None
        self.num_reporting += sequence.params.num_logprobs > 0

    def start_decoding(self, sequence: Sequence) -> None:
        insort(self.decoding, sequence, key=by_slot)
        self.joined.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Gives up a sequence's slot. The next plan tells the executor before it fills the slot again."""
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        elif not sequence.is_beam:
            del self.decoding[bisect_left(self.decoding, sequence.slot, key=by_slot)]
        self.retired_slots.append(sequence.slot)
        heappush(self._free_slots, sequence.slot)
        sequence.slot = -1

    def replace(self, sequence: Sequence, successor: Sequence) -> None:
        """Replaces a sequence by the successor that has taken over its slot."""
        del self.running[sequence]
        self.running[successor] = None

    def vacate(self, sequence: Sequence) -> int:
        """Removes a sequence but keeps its slot held; the next plan retires it. Returns the slot."""
        del self.running[sequence]
        self.retired_slots.append(sequence.slot)
        return sequence.slot

    def take_resumed(self, now_s: float) -> list[BeamGroup]:
        """Returns the groups whose pauses have ended, which do not pause any longer."""
        resumed = [group for group in self.paused if group.resume_s <= now_s]
        self.paused = [group for group in self.paused if group.resume_s > now_s]
        return resumed

    def drop(self, sequence: Sequence) -> None:
        """Removes a sequence and gives up its slot."""
        del self.running[sequence]
        self.num_reporting -= sequence.params.num_logprobs > 0
        if sequence.slot >= 0:
            self.retire(sequence)


def by_slot(sequence: Sequence) -> int:
    return sequence.slot
