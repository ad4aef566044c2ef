"""The waiting queue: sequences that hold no slot and no block, in the order of the policy."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from scheduler.core.policy import OrderKey, Policy
from scheduler.core.sequence import Sequence


class AdmissionQueue(Protocol):
    """Selects the waiting sequence that is admitted next. `FairQueue` is the default."""

    @property
    def due_s(self) -> float | None:
        """The time at which `first` changes even if no other event happens; None: never."""

    def first(self) -> Sequence | None:
        """Returns the sequence to admit next; None if no sequence may be admitted now."""


class WaitingQueue:
    """A sorted list. A preempted sequence returns to its place, before later arrivals.

    `num_prompt_tokens` also counts the output with which resumed sequences arrived.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[OrderKey, Sequence]] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def first(self) -> Sequence | None:
        return self._entries[0][1] if self._entries else None

    def before(self, priority: int) -> tuple[int, int]:
        """Returns the numbers of sequences, and of their prompt tokens, that come before a new request."""
        behind: OrderKey = (self._policy.rank(priority) + 1,)
        place = bisect_left(self._entries, behind, key=_key)
        if place == len(self):
            return place, self.num_prompt_tokens
        return place, sum(sequence.num_given_tokens for _, sequence in self._entries[:place])

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (self._policy.order(sequence), sequence), key=_key)
        self.num_prompt_tokens += sequence.num_given_tokens

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that is in the queue."""
        place = bisect_left(self._entries, self._policy.order(sequence), key=_key)
        if place == len(self._entries) or self._entries[place][1] is not sequence:
            raise LookupError(f"{sequence!r} is not waiting")
        del self._entries[place]
        self.num_prompt_tokens -= sequence.num_given_tokens


def _key(entry: tuple[OrderKey, Sequence]) -> OrderKey:
    return entry[0]
