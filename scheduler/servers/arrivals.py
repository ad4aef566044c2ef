"""Counts the requests of each router, so that a router knows which of them a report of the load contains."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTER = "quire-router"
"""The metadata of a call of GenerateMany that names its router."""

MAX_ID_BYTES = 64
MAX_ROUTERS = 256
"""Beyond this number, the router that has sent nothing for the longest time is forgotten."""


class Arrivals:
    """The number of requests of each router that were admitted or refused."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def of(self, router_id: str) -> int:
        return self._numbers.get(router_id, 0)

    def counter(self, router_id: object) -> Callable[[], None]:
        """Returns what counts a request of a router. The requests of a caller without an id are not counted."""
        if isinstance(router_id, str) and 0 < len(router_id) <= MAX_ID_BYTES:
            return partial(self._count, router_id)
        return lambda: None

    def _count(self, router_id: str) -> None:
        self._numbers[router_id] = self._numbers.get(router_id, 0) + 1
        self._numbers.move_to_end(router_id)
        if len(self._numbers) > MAX_ROUTERS:
            self._numbers.popitem(last=False)
