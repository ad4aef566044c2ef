"""Phases: results are kept however a phase ends, and no process is left behind."""

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.gpu import check, phases
from bench.gpu.phases import OUTPUT, Phase, run_phase

WRITES = "import json, sys; json.dump({'part': 1}, open(sys.argv[1], 'w')); print('written'); "


def program(text: str, limit_s: float = 60.0, **settings: Any) -> Phase:
    return Phase("program", ("-c", text, OUTPUT), limit_s, **settings)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def soon() -> float:
    return time.monotonic() + 60.0


def test_passing_phase_has_its_results(output: Path) -> None:
    result = run_phase(program(WRITES), output, soon())
    assert (result.status, result.results, result.last_lines) == ("passed", {"part": 1}, ())
    assert 0 < result.wall_s < result.limit_s


def test_failing_phase_keeps_partial_results_and_last_lines(output: Path) -> None:
    result = run_phase(program(WRITES + "raise ValueError('too hot')"), output, soon())
    assert (result.status, result.results) == ("failed", {"part": 1})
    assert result.last_lines[0] == "written"
    assert result.last_lines[-1] == "ValueError: too hot"


def test_results_of_an_earlier_phase_are_not_reused(output: Path) -> None:
    output.write_text('{"part": 0}')
    assert run_phase(program("pass"), output, soon()).results is None


def test_incomplete_file_is_no_result(output: Path) -> None:
    result = run_phase(program("import sys; open(sys.argv[1], 'w').write('{\"part')"), output, soon())
    assert (result.status, result.results) == ("passed", None)


@pytest.mark.parametrize("has_own_session", [False, True])
def test_phase_that_is_cut_off_leaves_no_process(
    has_own_session: bool, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a process that ignores SIGTERM nor its child survives."""
    monkeypatch.setattr(phases, "_KILL_AFTER_S", 0.5)
    text = (
        "import json, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        f"start_new_session={has_own_session}); "
        "json.dump({'child': child.pid}, open(sys.argv[1], 'w')); print('waiting', flush=True); time.sleep(600)"
    )
    result = run_phase(program(text, limit_s=3.0), output, soon())
    assert (result.status, result.last_lines) == ("cut off", ("waiting",))
    assert result.results is not None
    child = result.results["child"]
    assert gone(child)


def gone(pid: int) -> bool:
    """Returns True if the process ends within a second."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_no_phase_starts_after_the_deadline(output: Path) -> None:
    result = run_phase(program(WRITES), output, time.monotonic() - 1.0)
    assert (result.status, result.wall_s, result.results) == ("skipped", 0.0, None)
    assert not output.exists()


def test_environment_of_a_phase_extends_the_parents(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PARENT", "1")
    text = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    found = run_phase(program(text, environment={"OF_THE_PHASE": "2"}), output, soon()).results
    assert found is not None
    assert (found["OF_THE_PARENT"], found["OF_THE_PHASE"]) == ("1", "2")
    assert "OF_THE_PHASE" not in os.environ


@pytest.mark.parametrize(
    ("vital", "other", "is_correct"), [("pass", "1 / 0", True), ("1 / 0", "pass", False), (None, "pass", None)]
)
def test_check_is_correct_if_its_vital_phases_pass(vital: str | None, other: str, is_correct: bool | None) -> None:
    known = [Phase("other", ("-c", other), 60.0)]
    if vital is not None:
        known.append(Phase("vital", ("-c", vital), 60.0, is_vital=True))
    kept: list[str] = []
    report = check.run(known, torch.device("cpu"), 60.0, lambda now: kept.append(json.dumps(now)))
    assert report["is_correct"] is is_correct
    assert list(report["phases"]) == [phase.name for phase in known]
    assert len(kept) == len(known)  # after each phase
    assert json.loads(kept[-1]) == json.loads(json.dumps(report))
