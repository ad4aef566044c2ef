"""Engines take turns: same traces, alternating order, the others stopped, and medians of ratios."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bench.load import LoadResult, RequestRecord
from bench.pool_sampler import PoolStats
from bench.report import save, summarize
from bench.serving.engines import Engine, Observed, all_stopped
from bench.serving.measurer import (
    LoadSettings,
    Run,
    Turn,
    measure,
    plan_turns,
    ratios,
    ratios_by_round,
    warm_up_trace,
)
from bench.serving.report import render_table, report
from bench.trace import TraceRequest, TraceSettings, make_trace
from quire.block_map import ServerInfo, ServerState

INFO = ServerInfo("0", "made up", "float32", 512, 100, 16, 500, 64, 512, "fcfs", ServerState.SERVING)
POOL = PoolStats(3, 0.125, 0.5, 7, 1, 4, 2, num_preemptions=9, num_cow_copies=1)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FAST = RequestRecord(0.0, (0.010, 0.020, 0.040), 5, 3, num_cached_tokens=2)
SLOW = RequestRecord(1.0, (1.030, 1.060), 7, 4)
LONG = RequestRecord(0.0, (1.5, 3.0), 1, 2)
SHORT = RequestRecord(2.0, (2.050,), 1, 1)


def run_of(
    engine: str,
    concurrency: int,
    wall_s: float,
    *records: RequestRecord,
    round_index: int = 0,
    pool: PoolStats | None = None,
) -> Run:
    turn = Turn(round_index, concurrency, TraceSettings(2, 512, 500))
    load = LoadResult(concurrency, wall_s, records)
    return Run(turn, summarize(engine, load, pool), Observed(load, pool))


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Starts a process in a group of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def is_soon(pid: int, *, stopped: bool) -> bool:
    """Returns True once the process is stopped, or runs, as expected; waits for a signal to take effect."""
    for _ in range(500):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
        if (state in "Tt") == stopped:
            return True
        time.sleep(0.01)
    return False


def scripted(name: str, wall_s: float, happened: list[tuple[str, int, tuple[int, ...]]], sleeper: int) -> Engine:
    """Returns an engine that records its runs. The peer's process has to be stopped during the other engines' runs."""

    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        happened.append((name, concurrency, tuple(hash(request.prompt_token_ids) for request in trace)))
        assert is_soon(sleeper, stopped=name != "peer")
        records = tuple(
            RequestRecord(0.0, (0.1, 0.2), len(request.prompt_token_ids), request.max_tokens) for request in trace
        )
        return Observed(LoadResult(concurrency, wall_s, records))

    return Engine(name, run, os.getpgid(sleeper) if name == "peer" else None)


@linux_only
def test_processes_are_stopped_during_the_block_only(sleeper: int) -> None:
    async def run(trace: Sequence[TraceRequest], concurrency: int) -> Observed:
        raise NotImplementedError

    with all_stopped([Engine("peer", run, os.getpgid(sleeper)), Engine("transformers", run)]):
        assert is_soon(sleeper, stopped=True)
    assert is_soon(sleeper, stopped=False)


@pytest.mark.parametrize("num_shared_tokens", [0, 40])
def test_no_run_begins_with_the_prompts_of_the_warm_up(num_shared_tokens: int) -> None:
    turns = plan_turns(LoadSettings((1, 2, 64), num_rounds=3, num_shared_tokens=num_shared_tokens), INFO)
    warm_up = {request.prompt_token_ids[:16] for request in warm_up_trace(turns[0].trace)}
    counted = {request.prompt_token_ids[:16] for turn in turns for request in make_trace(turn.trace)}
    assert len(warm_up) == (1 if num_shared_tokens else 2)
    assert not warm_up & counted


@linux_only
async def test_engines_take_turns_on_the_same_traces_in_alternating_order(sleeper: int) -> None:
    happened: list[tuple[str, int, tuple[int, ...]]] = []
    engines = [scripted("quire", 1.0, happened, sleeper), scripted("peer", 4.0, happened, sleeper)]
    turns = plan_turns(LoadSettings((1, 2), num_requests=4, num_rounds=2), INFO)
    seen: list[Run] = []
    runs = await measure(engines, turns, warm_up_trace(turns[0].trace), seen.append)
    assert seen == runs

    warm_ups, counted = happened[:2], happened[2:]
    assert [name for name, *_ in warm_ups] == ["quire", "peer"]
    assert [(name, concurrency) for name, concurrency, *_ in counted] == [
        ("quire", 1), ("peer", 1), ("quire", 2), ("peer", 2),
        ("peer", 1), ("quire", 1), ("peer", 2), ("quire", 2),
    ]  # fmt: skip
    for one, other in zip(counted[::2], counted[1::2], strict=True):
        assert one[2] == other[2], "both engines get the same trace"
    assert len({trace for *_, trace in counted}) == 4, "each turn has its own trace"

    assert ratios_by_round(runs) == {"peer": {1: pytest.approx([4.0] * 2), 2: pytest.approx([4.0] * 2)}}
    values = report(runs, INFO)
    assert values["ratios"] == pytest.approx({1: 4.0, 2: 4.0})
    places = [(trace["concurrency"], trace["round"], trace["profile"]) for trace in values["traces"]]
    for engine in ("quire", "peer"):
        own = [run for run in values["runs"] if run["engine"] == engine]
        assert [(run["concurrency"], run["round"], run["profile"]) for run in own] == places
    assert [(trace["concurrency"], trace["round"]) for trace in values["traces"]] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_table(runs))
    assert "4.00 (4.00-4.00)" in console.export_text()


def test_ratio_is_the_median_of_the_rounds() -> None:
    runs = [
        run_of(engine, 1, wall_s, FAST, round_index=index)
        for index, wall_s in enumerate((2.0, 3.0, 30.0))
        for engine, wall_s in (("quire", 1.0), ("peer", wall_s))
    ]
    assert ratios(runs) == {"peer": {1: pytest.approx(3.0)}}


def test_ratios_are_quires_tokens_per_second_over_the_others() -> None:
    runs = [
        run_of("quire", 1, 1.0, FAST),
        run_of("quire", 4, 0.5, FAST),
        run_of("transformers", 1, 3.0, FAST),
        run_of("peer", 4, 1.0, FAST),
        run_of("peer", 16, 1.0, FAST),
    ]
    found = ratios(runs)
    assert set(found) == {"transformers", "peer"}
    assert found["transformers"] == pytest.approx({1: 3.0})
    assert found["peer"] == pytest.approx({4: 2.0})


def test_table_has_a_row_for_each_engine_and_fits_80_columns() -> None:
    runs = [
        run_of("quire", 16, 4.0, LONG, pool=POOL),
        run_of("transformers", 4, 8.0, FAST, SLOW),
        run_of("quire", 4, 2.0, FAST, SLOW, pool=POOL),
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(render_table(runs))
    rows = [line.split() for line in out.getvalue().splitlines() if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [
        ["4", "transformers", "0.9"],
        ["4", "quire", "3.5"],
        ["16", "quire", "0.5"],
    ]
    assert rows[0][-1] == "4.00"
    assert rows[1][3:] == ["1.00", "20.0/29.8", "12.5/14.9", "20.0/29.8", "12.5%", "9"]
    assert rows[2][3:] == ["0.25", "1500/1500", "1500/1500", "1500/1500", "12.5%", "9"]


def test_report_is_json_and_is_saved_in_a_new_folder(tmp_path: Path) -> None:
    runs = [run_of("quire", 4, 2.0, FAST, pool=POOL), run_of("peer", 4, 4.0, SHORT)]
    path = tmp_path / "new" / "name.json"
    save(path, report(runs, INFO))
    read = json.loads(path.read_text())
    assert read["server"]["model_name"] == "made up"
    assert [trace["seed"] for trace in read["traces"]] == [7]
    assert read["runs"][0]["pool"]["num_preemptions"] == 9
    assert read["runs"][0]["ttft_ms"].keys() == {"p50", "p90", "p99"}
    assert read["runs"][1]["itl_ms"] is None
    assert read["quire_tokens_per_s_ratio_to"] == {"peer": {"4": pytest.approx(6.0)}}
    assert read["ratios"] == {"4": pytest.approx(6.0)}
    assert read["machine"].keys() >= {"num_cpus", "architecture", "system", "python", "device"}
