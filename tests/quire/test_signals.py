"""Real signals, which a process sends to itself."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from quire.signals import EndSignals, end_signals


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """Lets SIGHUP have its default effect, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_terminal_that_closes_drains_and_never_stops_at_once(first: signal.Signals) -> None:
    signals = EndSignals()
    for number in (first, signal.SIGHUP, signal.SIGHUP):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(signals.first.wait(), 20)
        await asyncio.sleep(0.05)
        assert not signals.second.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(signals.second.wait(), 20)


def test_nohup_is_respected() -> None:
    assert signal.SIGHUP in end_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in end_signals()
