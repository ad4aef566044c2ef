"""The polling interval of `quire kv --watch`."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from quire.block_map import BlockMap, PoolSummary
from quire.cli import kv


class SlowClient:
    """A client that answers after `delay_s` of a simulated clock."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.now_s = 0.0

    def block_map(self) -> BlockMap:
        self.now_s += self.delay_s
        return BlockMap(4, (), (), 0, 0, 0, 0, 0, PoolSummary(*[0] * 10))


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("delay_s", "pause_s"),
    [(0.001, 0.25), (0.01, 0.5), (10, kv.MAX_PAUSE_S)],
)
def test_slow_servers_are_polled_less_often(
    monkeypatch: pytest.MonkeyPatch, delay_s: float, pause_s: float, is_terminal: bool
) -> None:
    client, pauses = SlowClient(delay_s), list[float]()

    def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(kv, "time", SimpleNamespace(monotonic=lambda: client.now_s, sleep=sleep))
    console = Console(quiet=True, force_terminal=is_terminal)
    with pytest.raises(KeyboardInterrupt):
        kv.watch(client, console, interval_s=0.25)  # type: ignore[arg-type]
    assert pauses == pytest.approx([pause_s] * 3)
