"""Scheduling policies: the order of the sequences of one tenant."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.sequence import Sequence

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of admission and, reversed, of preemption: the victim is the running sequence that comes last.

    The keys of `order` are unique and never change.
    """

    name: str
    order: Callable[[Sequence], OrderKey]


def _by_arrival(sequence: Sequence) -> OrderKey:
    return (sequence.arrival, sequence.index)


def _by_priority(sequence: Sequence) -> OrderKey:
    return (sequence.request.priority, sequence.arrival, sequence.index)


FCFS = Policy("fcfs", order=_by_arrival)
PRIORITY = Policy("priority", order=_by_priority)

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY)}
