"""Counts the requests of each router, so that a router knows which of them a report of the load contains."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUTER = "quire-router"
"""The metadata of a call of GenerateMany that names its router."""

MAX_ID_BYTES = 64


class Arrivals:
    """The number of requests of each router that were admitted or refused while it watches."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._num_watches: Counter[str] = Counter()

    @contextmanager
    def watched(self, router_id: str) -> Iterator[Callable[[], int]]:
        """Yields what returns the number of requests of a router since the context began."""
        num_before = self._numbers[router_id]
        self._num_watches[router_id] += 1
        try:
            yield lambda: self._numbers[router_id] - num_before
        finally:
            self._num_watches[router_id] -= 1
            if not self._num_watches[router_id]:
                del self._num_watches[router_id], self._numbers[router_id]

    def counter(self, router_id: object) -> Callable[[], None]:
        """Returns what counts a request of a router. The requests of a caller without an id are not counted."""
        return partial(self._count, router_id) if isinstance(router_id, str) else lambda: None

    def _count(self, router_id: str) -> None:
        if router_id in self._num_watches:  # no report tells other numbers, and clients can invent ids
            self._numbers[router_id] += 1
