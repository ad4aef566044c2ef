"""Faults that happen to a running `quire serve`, chosen by a seed."""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import psutil

from tests.support.e2e.process import ProcessEnded
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.stack import Stack
from tests.support.waiting import until

STEP_TIMEOUT_S = 4.0
"""Time after which `quire serve` replaces a service that is stopped."""

LOAD_TIMEOUT_S = 20.0
"""Time after which it replaces one that is stopped while it loads, and so prints no line."""

_SHORT_STOP_S = 1.0
_LONGEST_LOADING_S = 4.0
_NEW_PROCESS_S = 60.0


class Faults:
    """Faults of one stack, which `happen` by their names in NAMES.

    proxy  forwards the connections of the clients
    """

    def __init__(self, stack: Stack, proxy: Proxy, random: Random) -> None:
        self._stack = stack
        self._proxy = proxy
        self._random = random
        self.counts: Counter[str] = Counter()

    async def happen(self, names: list[str], until_s: float, pause_s: float) -> None:
        """Lets faults of these names happen at random until that time of the loop, `pause_s` apart on average."""
        loop = asyncio.get_running_loop()
        while (now_s := loop.time()) < until_s:
            await asyncio.sleep(min(self._random.uniform(0, 2 * pause_s), until_s - now_s))
            name = self._random.choice(names)
            try:
                await _FAULTS[name](self)
            except (ProcessEnded, psutil.NoSuchProcess):
                continue  # the fault before ended the process
            self.counts[name] += 1

    async def send(self, service: str, number: signal.Signals) -> None:
        self._stack.send(service, number)

    async def send_both(self, number: signal.Signals) -> None:
        for service in ("scheduler", "executor"):
            with suppress(ProcessEnded, psutil.NoSuchProcess):
                await self.send(service, number)

    async def pause(self, service: str) -> None:
        pid = self._stack.send(service, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0, _SHORT_STOP_S))
        psutil.Process(pid).send_signal(signal.SIGCONT)

    async def kill_while_loading(self) -> None:
        killed = self._stack.send("executor", signal.SIGKILL)
        await until(lambda: self._stack.pid("executor") not in (None, killed), _NEW_PROCESS_S, interval_s=0.05)
        await asyncio.sleep(self._random.uniform(0, _LONGEST_LOADING_S))
        await self.send("executor", signal.SIGKILL)

    async def cut(self) -> None:
        self._proxy.cut()

    async def stall(self) -> None:
        self._proxy.stall()
        await asyncio.sleep(self._random.uniform(0, _SHORT_STOP_S))
        self._proxy.resume()

    async def refuse(self) -> None:
        self._proxy.refuse()
        await asyncio.sleep(self._random.uniform(0, _SHORT_STOP_S))
        self._proxy.accept()

    async def upgrade(self) -> None:
        self._stack.serve.send(signal.SIGUSR2)


_FAULTS: dict[str, Callable[[Faults], Awaitable[None]]] = {
    "kill-executor": lambda faults: faults.send("executor", signal.SIGKILL),
    "kill-loading-executor": Faults.kill_while_loading,
    "stop-executor": lambda faults: faults.send("executor", signal.SIGSTOP),
    "pause-executor": lambda faults: faults.pause("executor"),
    "end-executor": lambda faults: faults.send("executor", signal.SIGTERM),
    "pause-scheduler": lambda faults: faults.pause("scheduler"),
    "stall-clients": Faults.stall,
    "kill-scheduler": lambda faults: faults.send("scheduler", signal.SIGKILL),
    "stop-scheduler": lambda faults: faults.send("scheduler", signal.SIGSTOP),
    "kill-both": lambda faults: faults.send_both(signal.SIGKILL),
    "stop-both": lambda faults: faults.send_both(signal.SIGSTOP),
    "end-both": lambda faults: faults.send_both(signal.SIGTERM),
    "cut-clients": Faults.cut,
    "refuse-clients": Faults.refuse,
    "upgrade": Faults.upgrade,
}
NAMES = tuple(_FAULTS)
