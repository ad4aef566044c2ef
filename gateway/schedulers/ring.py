"""Chooses the scheduler of a request: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018).

Requests whose prompts begin alike go to the same scheduler, which has the beginning in its prefix cache, as long as
that scheduler has at most a quarter more than its share of all streams. Otherwise the next one on the ring takes the
request. If a scheduler goes away or comes back, only the requests that it would get move.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from quire.v1 import generation_pb2 as pb

NUM_POINTS = 64
"""Points of each scheduler on the ring: with more of them, the shares are more even."""

MAX_EXCESS = 1.25
PREFIX_CHARACTERS = 1024
PREFIX_TOKENS = 256


class Ring:
    """The schedulers by name, at fixed points of a circle."""

    def __init__(self, names: Sequence[str]) -> None:
        points = sorted((_hash(f"{name}#{i}".encode()), name) for name in names for i in range(NUM_POINTS))
        self._points = [point for point, _ in points]
        self._names = [name for _, name in points]

    def choose(self, key: bytes, loads: Mapping[str, float]) -> str:
        """Returns the scheduler for a key, among those with a load. `loads` must not be empty."""
        most = math.ceil(MAX_EXCESS * (sum(loads.values()) + 1) / len(loads))
        start = bisect_left(self._points, _hash(key))
        for i in range(len(self._names)):
            name = self._names[(start + i) % len(self._names)]
            if name in loads and loads[name] < most:
                return name
        return min(loads, key=lambda name: loads[name])


def affinity_key(request: pb.GenerateRequest) -> bytes:
    """Returns the beginning of the prompt, with its salt: requests with different salts share nothing."""
    match request.WhichOneof("prompt"):
        case "text":
            start = request.text[:PREFIX_CHARACTERS]
        case "token_ids":
            start = str(request.token_ids.ids[:PREFIX_TOKENS])
        case _:
            parts, num_left = [], PREFIX_CHARACTERS
            for message in request.chat.messages:
                parts.append(f"{message.role}:{message.content[:num_left]}")
                num_left -= len(message.content)
                if num_left <= 0:
                    break
            start = "\n".join(parts)
    return f"{request.cache_salt}\0{start}".encode(errors="replace")


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())
