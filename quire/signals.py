"""The signals that end a service: the first one drains it, the second one stops it at once."""

import asyncio
import signal


def end_signals() -> list[signal.Signals]:
    """Returns the signals that end this process: also that of a terminal that closes, unless nohup ignores it."""
    signals = [signal.SIGTERM, signal.SIGINT]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


class EndSignals:
    """Sets an event at the first signal, and another at the second, unless that is SIGHUP.

    When a terminal closes, its shell and the kernel can send SIGHUP both.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._count, number)

    def _count(self, number: signal.Signals) -> None:
        if not self.first.is_set():
            self.first.set()
        elif number is not signal.SIGHUP:
            self.second.set()
