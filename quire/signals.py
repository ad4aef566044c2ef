"""The signals that end a service: the first one drains it, the second one stops it at once."""

import asyncio
import signal


class EndSignals:
    """Sets an event at the first SIGTERM or SIGINT, and another at the second."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
