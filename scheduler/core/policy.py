"""Scheduling policies: the order of the sequences of one tenant."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.sequence import Sequence

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of admission: by the `rank` of a request's priority, then by arrival.

    Victims of preemption are taken from the highest rank.
    """

    name: str
    rank: Callable[[int], int]

    def order(self, sequence: Sequence) -> OrderKey:
        """Returns a key that is unique and never changes."""
        return (self.rank(sequence.request.priority), sequence.arrival, sequence.index)


FCFS = Policy("fcfs", rank=lambda priority: 0)
PRIORITY = Policy("priority", rank=lambda priority: priority)

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY)}
