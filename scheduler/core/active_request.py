"""A request that was added and has not ended, with all the sequences it has."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from scheduler.core.beam_group import BeamGroup
from scheduler.core.request import Request
from scheduler.core.sequence import Sequence


@dataclass(slots=True)
class ActiveRequest:
    """Samples beyond the first, and beams, are born when the prompt is computed; until then their slots are held."""

    request: Request
    sequences: list[Sequence]
    child_slots: list[int] = field(default_factory=list)  # held for samples or beams to be born
    group: BeamGroup | None = None
    arrival_s: float = -inf  # the time that the core had been told by then

    @property
    def num_unborn(self) -> int:
        """Slots it takes to admit the request, but for the first."""
        if self.request.beam is not None:
            return self.request.beam.width - 1
        return self.request.num_sequences - len(self.sequences)

    @property
    def has_ended(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def holders(self, sequence: Sequence) -> list[Sequence]:
        """Who holds the slots and blocks of a running sequence: itself, or the beams that took over from it."""
        return list(self.group.beams) if self.group and self.group.beams else [sequence]

    def unfinished(self) -> Iterator[Sequence]:
        for sequence in self.sequences:
            if not sequence.is_finished:
                yield from self.holders(sequence)
