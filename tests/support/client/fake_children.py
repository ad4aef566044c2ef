"""Children without processes, for a supervisor on a loop with virtual time."""

import asyncio
from collections.abc import Iterable

from quire.cli.child import ChildExit, ChildSpec, LogSink


class FakeChild:
    """Replaces `quire.cli.child.Child`. Each start takes the next life from `lives`: (seconds, return code).

    After the last life it runs until it is told to end.
    """

    lives: Iterable[tuple[float, int]] = ()

    def __init__(self, spec: ChildSpec, log: LogSink) -> None:
        self.name, self.grace_s = spec.name, spec.grace_s
        self._lives = iter(self.lives)
        self._stopping = asyncio.Event()
        self.started_s: list[float] = []
        self.last_exit: ChildExit | None = None
        self.pid: int | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def start(self) -> None:
        self.started_s.append(asyncio.get_running_loop().time())
        self.pid = len(self.started_s)

    async def wait(self) -> ChildExit:
        life = next(self._lives, None)
        if life is None:
            await self._stopping.wait()
        elif await self.stopping_within(life[0]):
            life = None
        self.pid = None
        self.last_exit = ChildExit(self.name, life[1] if life else 0, "")
        return self.last_exit

    async def stopping_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def terminate(self) -> None:
        self._stopping.set()

    def kill(self) -> None:
        self._stopping.set()
