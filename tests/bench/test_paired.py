"""Two servers in turns: the same traces, changing order, one of them stopped while the other works."""

import asyncio
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bench.load import LoadResult, RequestRecord
from bench.paired import Pair, as_values, by_concurrency, measure, render, stopped
from bench.serve import BenchSettings, Engine, Observed
from bench.trace import TraceRequest
from quire.block_map import ServerInfo, ServerState

INFO = ServerInfo("0", "made up", "float32", 512, 100, 16, 500, 64, 512, "fcfs", ServerState.SERVING)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process in a group of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def is_soon(pid: int, *, stopped: bool) -> bool:
    """Signals take their time."""
    for _ in range(500):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
        if (state in "Tt") == stopped:
            return True
        time.sleep(0.01)
    return False


@linux_only
def test_stopped_and_gone_on(sleeper: int) -> None:
    with stopped(os.getpgid(sleeper)):
        assert is_soon(sleeper, stopped=True)
    assert is_soon(sleeper, stopped=False)


def test_a_peer_that_runs_here_is_not_stopped() -> None:
    with stopped(None):
        pass


@linux_only
def test_turns(sleeper: int) -> None:
    happened: list[tuple[str, int, tuple[int, ...]]] = []

    def engine(name: str, wall_s: float) -> Engine:
        async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
            prompts = tuple(hash(request.prompt_token_ids) for request in trace)
            happened.append((name, concurrency, prompts))
            if len(happened) > 2:  # the warm-ups are over
                assert is_soon(sleeper, stopped=name == "quire")
            records = tuple(
                RequestRecord(0.0, (0.1, 0.2), len(request.prompt_token_ids), request.max_tokens) for request in trace
            )
            return Observed(LoadResult(concurrency, wall_s, records))

        return run

    settings = BenchSettings("unused", (1, 2), num_requests=4)
    turns = measure(settings, 2, INFO, engine("quire", 1.0), engine("peer", 4.0), os.getpgid(sleeper))
    pairs = asyncio.run(turns)

    warm_ups, runs = happened[:2], happened[2:]
    assert [name for name, *_ in warm_ups] == ["quire", "peer"]
    assert [(name, concurrency) for name, concurrency, *_ in runs] == [
        ("quire", 1), ("peer", 1), ("quire", 2), ("peer", 2),
        ("peer", 1), ("quire", 1), ("peer", 2), ("quire", 2),
    ]  # fmt: skip
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        assert one[2] == other[2], "the same trace for both"
    assert len({trace for *_, trace in runs}) == 4, "another one for each round and number of clients"

    assert [pair.ratio for pair in pairs] == pytest.approx([4.0] * 4)
    assert {c: len(own) for c, own in by_concurrency(pairs).items()} == {1: 2, 2: 2}
    assert as_values(pairs, INFO)["ratios"] == pytest.approx({"1": 4.0, "2": 4.0})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render([Pair(pair.quire, pair.peer) for pair in pairs]))
    assert "4.00-4.00" in console.export_text()
