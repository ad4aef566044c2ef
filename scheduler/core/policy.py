"""Scheduling policies: which sequence is admitted first, and which is preempted when the pool is empty."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.sequence import Sequence

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of admission and an order of preemption.

    `order` sorts the waiting queue; its keys are unique and never change. The victim of a preemption is the running
    sequence that comes last in `victim_order`.
    """

    name: str
    order: Callable[[Sequence], OrderKey]
    victim_order: Callable[[Sequence], OrderKey]


def _by_arrival(sequence: Sequence) -> OrderKey:
    return (sequence.arrival, sequence.index)


def _by_priority(sequence: Sequence) -> OrderKey:
    return (sequence.request.priority, sequence.arrival, sequence.index)


FCFS = Policy("fcfs", order=_by_arrival, victim_order=_by_arrival)
PRIORITY = Policy("priority", order=_by_priority, victim_order=_by_priority)

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY)}
