"""Scheduling policies: the order of the sequences of one tenant."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.sequence import Sequence

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of admission: by `rank`, then by arrival. Victims of preemption are taken from the highest rank."""

    name: str
    rank: Callable[[Sequence], int]

    def order(self, sequence: Sequence) -> OrderKey:
        """Returns a key that is unique and never changes."""
        return (self.rank(sequence), sequence.arrival, sequence.index)


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority


FCFS = Policy("fcfs", rank=lambda sequence: 0)
PRIORITY = Policy("priority", rank=_priority)

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY)}
