"""When requests have to have ended."""

from collections.abc import Container, Iterator
from heapq import heappop, heappush

from scheduler.core.request import Request


class Deadlines:
    """A heap. Requests that end early stay in it until their turn comes: `unfinished` says whose counts."""

    def __init__(self, unfinished: Container[int]) -> None:
        self._unfinished = unfinished
        self._entries: list[tuple[float, int]] = []

    def add(self, request: Request) -> None:
        if request.deadline_s is not None:
            heappush(self._entries, (request.deadline_s, request.request_id))

    def take_due(self, now_s: float) -> Iterator[int]:
        """Requests whose deadline is not after `now_s`, each once. The caller ends them."""
        while (next_s := self.next_s) is not None and next_s <= now_s:
            yield heappop(self._entries)[1]

    @property
    def next_s(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        while self._entries and self._entries[0][1] not in self._unfinished:
            heappop(self._entries)
        return self._entries[0][0] if self._entries else None
