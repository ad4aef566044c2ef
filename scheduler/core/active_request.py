"""A request that was added and has not ended, with all of its sequences."""

from dataclasses import dataclass, field
from math import inf

from scheduler.core.beams.group import BeamGroup
from scheduler.core.request import Request
from scheduler.core.sequence import Sequence


@dataclass(slots=True)
class ActiveRequest:
    """A request and its sequences.

    Samples beyond the first, and beams, are created when the prompt has been computed. Until then the request holds
    their slots (`child_slots`). All samples of a request that is resumed with output exist from the start. `arrival_s`
    is the core's time when the request arrived. `has_started` says that its first step is done.
    """

    request: Request
    sequences: list[Sequence]
    child_slots: list[int] = field(default_factory=list)
    group: BeamGroup | None = None
    arrival_s: float = -inf
    has_started: bool = False

    @property
    def num_unborn(self) -> int:
        """Number of slots, beyond the first, that the request needs when it is admitted."""
        return self.request.num_slots - len(self.sequences)

    @property
    def has_ended(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def holders(self, sequence: Sequence) -> list[Sequence]:
        """Returns the sequences that hold a sequence's slots and blocks: itself, or the beams that replaced it."""
        return list(self.group.beams) if self.group and self.group.beams else [sequence]
