"""Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018).

Requests with the same key go to the same replica, as long as that replica has at most a quarter more than its share of
all requests. Otherwise the next one on the ring takes the request. If a replica goes away or comes back, only the
requests that it would get move.
"""

import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping
from hashlib import blake2b

NUM_POINTS = 64
"""Points of each replica on the ring: with more of them, the shares are more even."""

MAX_EXCESS = 1.25


class Ring:
    """The replicas by name, at fixed points of a circle."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._points: list[int] = []
        self._names: list[str] = []
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Adds the points of a replica that is not on the ring."""
        for i in range(NUM_POINTS):
            point = _hash(f"{name}#{i}".encode())
            place = bisect_left(self._points, point)
            self._points.insert(place, point)
            self._names.insert(place, name)

    def remove(self, name: str) -> None:
        """Removes the points of a replica. It is no error if it has none."""
        left = [(point, other) for point, other in zip(self._points, self._names, strict=True) if other != name]
        self._points = [point for point, _ in left]
        self._names = [other for _, other in left]

    def choose(self, key: bytes, loads: Mapping[str, float]) -> str:
        """Returns the replica for a key, among those with a load. `loads` must not be empty."""
        most = math.ceil(MAX_EXCESS * (sum(loads.values()) + 1) / len(loads))
        for name in self._from(key):
            if name in loads and loads[name] < most:
                return name
        return min(loads, key=lambda name: loads[name])

    def home(self, key: bytes, names: Container[str]) -> str | None:
        """Returns the first of these replicas for a key, whatever the loads are; None if none is on the ring."""
        return next((name for name in self._from(key) if name in names), None)

    def _from(self, key: bytes) -> Iterator[str]:
        """Yields the names at all points, from that of the key on."""
        start = bisect_left(self._points, _hash(key))
        for i in range(len(self._names)):
            yield self._names[(start + i) % len(self._names)]


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())
