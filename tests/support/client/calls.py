"""One interface to both clients, so that a test of common behaviour runs with each of them."""

import asyncio
from typing import Any

import pytest

import quire


class SyncCalls:
    """Makes single calls with the synchronous client."""

    def __init__(self, address: str, **defaults: Any) -> None:
        self._address, self._defaults = address, defaults

    def events(self, *arguments: Any, **options: Any) -> list[quire.Event]:
        with quire.Client(self._address, **self._defaults) as client:
            return list(client.generate(*arguments, **options))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        with quire.Client(self._address, **self._defaults) as client:
            return getattr(client, method)(*arguments, **options)


class AsyncCalls(SyncCalls):
    """Makes single calls with the asynchronous client."""

    def events(self, *arguments: Any, **options: Any) -> list[quire.Event]:
        async def collect() -> list[quire.Event]:
            async with quire.AsyncClient(self._address, **self._defaults) as client:
                return [event async for event in client.generate(*arguments, **options)]

        return asyncio.run(collect())

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def run() -> Any:
            async with quire.AsyncClient(self._address, **self._defaults) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(run())


KINDS = pytest.mark.parametrize("kind", [SyncCalls, AsyncCalls])
