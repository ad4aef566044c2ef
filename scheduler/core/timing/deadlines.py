"""The deadlines of requests."""

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush

from scheduler.core.request import Request

SPARE_ENTRIES = 1024
"""Entries of ended requests are removed when there are more than this number plus the number of unfinished requests."""


class Deadlines:
    """A heap of deadlines. `unfinished` holds the ids of the requests whose deadlines count.

    If a request ends early, its entry stays in the heap until its deadline, or until most entries belong to ended
    requests.
    """

    def __init__(self, unfinished: Collection[int]) -> None:
        self._unfinished = unfinished
        self._entries: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        if request.deadline_s is not None:
            if len(self._entries) > 2 * len(self._unfinished) + SPARE_ENTRIES:
                self._entries = [entry for entry in self._entries if entry[1] in self._unfinished]
                heapify(self._entries)
            heappush(self._entries, (request.deadline_s, request.request_id))

    def __len__(self) -> int:
        """Returns the number of entries, those of ended requests included."""
        return len(self._entries)

    def take_due(self, now_s: float) -> Iterator[int]:
        """Yields the requests whose deadline is not after `now_s`, each once. The caller ends them."""
        while (next_s := self.next_s) is not None and next_s <= now_s:
            yield heappop(self._entries)[1]

    @property
    def next_s(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        while self._entries and self._entries[0][1] not in self._unfinished:
            heappop(self._entries)
        return self._entries[0][0] if self._entries else None
