import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.step_traces import chrome_trace, idle_ratio, save_chrome_trace
from quire import StepTrace


def step(step_id: int, sent_ns: int, idle_ns: int) -> StepTrace:
    """Returns a step: sent after 100 ns, 1,000 ns of work, result 1,200 ns after sending, committed 50 ns later."""
    return StepTrace(
        epoch=1,
        step_id=step_id,
        num_sequences=2,
        num_tokens=5,
        planned_ns=sent_ns - 100,
        sent_ns=sent_ns,
        received_ns=sent_ns + 1200,
        committed_ns=sent_ns + 1250,
        queue_ns=20,
        prepare_ns=100,
        forward_ns=700,
        sample_ns=200,
        idle_ns=idle_ns,
    )


def test_idle_ratio_leaves_out_the_wait_before_the_first_step() -> None:
    assert idle_ratio([]) is None
    assert idle_ratio([step(1, 1000, 10**9)]) is None
    assert idle_ratio([step(1, 1000, 10**9), step(2, 2000, 0), step(3, 4000, 1000)]) == pytest.approx(1000 / 4000)


def test_overlapping_preparation_is_not_busy_time() -> None:
    steps = [replace(step(i, 1000 * i, 100 * (i - 1)), prepare_overlaps=True) for i in (1, 2)]
    assert [one.busy_ns for one in steps] == [900, 900]
    assert idle_ratio(steps) == pytest.approx(100 / 1900)
    spans = [event for event in chrome_trace(steps)["traceEvents"] if event["ph"] == "X" and event["pid"] == 2]  # type: ignore[attr-defined]
    lanes = {(event["name"].split()[-1], event["tid"]) for event in spans}
    assert lanes == {("prepare", 1), ("forward", 0), ("sample", 0)}


def test_chrome_trace_has_the_spans_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    save_chrome_trace(path, [step(7, 10_000, 0)])
    assert json.loads(path.read_text()) == chrome_trace([step(7, 10_000, 0)])
    spans = {
        event["name"]: (event["pid"], event["ts"], pytest.approx(event["dur"]))
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] == "X"
    }
    assert spans == {
        "step 7 send": (1, 9.9, 0.1),
        "step 7 in flight": (1, 10.0, 1.2),
        "step 7 commit": (1, 11.2, 0.05),
        "step 7 prepare": (2, 10.2, 0.1),
        "step 7 forward": (2, 10.3, 0.7),
        "step 7 sample": (2, 11.0, 0.2),
    }
