"""Replaces the services one after the other, so that they run the version that is installed now."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NoReturn

from quire.cli.supervisor import Supervisor
from quire.cli.watch import PROBE_TIMEOUT_S, Probe

_INTERVAL_S = 0.1


class Upgrade:
    """Replaces all children in turn, each time that it is asked to."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._asked = asyncio.Event()
        self._ending: str | None = None

    def ask(self) -> None:
        """Asks for a replacement. While a child is ending, this makes it end without waiting for its streams."""
        if self._ending is None:
            self._asked.set()
        else:
            self._supervisor.hurry(self._ending)

    async def run(self, groups: Sequence[Mapping[str, Probe]]) -> NoReturn:
        """Waits until it is asked, and then replaces the children in the order of `groups`. Never returns.

        groups  tells of each child whether it serves: the next group is replaced when all children of the one before
                it serve again. Those of one group are ended one after the other
        """
        while True:
            await self._asked.wait()
            self._asked.clear()
            for probes in groups:
                await self._replace(probes)

    async def _replace(self, probes: Mapping[str, Probe]) -> None:
        for name in probes:
            self._ending = name
            await self._supervisor.replace(name)
            self._ending = None
        for is_serving in probes.values():
            while not await is_serving(PROBE_TIMEOUT_S):  # noqa: ASYNC110 - another process sets no event here
                await asyncio.sleep(_INTERVAL_S)
