"""Counts the streams that are open, so that their number is bounded and no tenant can hold all of them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler.core import QueueFull

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler.telemetry.request_observer import ObservedRequest


class OpenStreams:
    """The open streams of each tenant.

    max_streams  streams open at once. Beyond it, only a tenant with less than an equal part of them may open more, up
                 to twice the number in all
    """

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._num_open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_open.total()

    @contextmanager
    def opened(self, tenant: str, observed: ObservedRequest) -> Iterator[None]:
        """Counts a stream of the tenant during the block. Raises QueueFull, and reports it, if there are too many."""
        if not self._has_room(tenant):
            observed.refused("resource_exhausted")
            raise QueueFull(f"{len(self)} streams are open")
        self._num_open[tenant] += 1
        try:
            yield
        finally:
            self._num_open[tenant] -= 1
            if not self._num_open[tenant]:
                del self._num_open[tenant]

    def _has_room(self, tenant: str) -> bool:
        if len(self) < self._max_streams:
            return True
        num_tenants = len(self._num_open.keys() | {tenant})
        return (
            num_tenants > 1
            and len(self) < 2 * self._max_streams
            and self._num_open[tenant] < self._max_streams // num_tenants
        )
