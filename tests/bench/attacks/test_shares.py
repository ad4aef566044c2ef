"""The clients of `bench shares` all have a stream at the server at once."""

import asyncio
import random
from collections import Counter
from typing import ClassVar, Self

import pytest

from bench.attacks import shares

_MAX_STREAMS = 256
"""Streams that a server of Quire permits on a connection."""


class Connection:
    """A client that counts the loops that use it."""

    opened: ClassVar[list["Connection"]] = []

    def __init__(self, address: str, **options: object) -> None:
        self.num_loops = 0
        self.opened.append(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


async def test_no_connection_has_more_clients_than_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    async def loop(client: Connection, tenant: str, rng: random.Random, counts: Counter[str]) -> None:
        client.num_loops += 1
        seen.add(rng.random())

    monkeypatch.setattr(Connection, "opened", [])
    monkeypatch.setattr(shares, "AsyncClient", Connection)
    monkeypatch.setattr(shares, "_client", loop)
    await asyncio.wait_for(shares._clients("address", "key", "tenant", 1650, Counter()), 10.0)
    numbers = [connection.num_loops for connection in Connection.opened]
    assert sum(numbers) == len(seen) == 1650
    assert max(numbers) <= _MAX_STREAMS
