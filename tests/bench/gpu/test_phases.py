"""Phases: results are kept however a phase ends, and no process is left behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu import phases
from bench.gpu.phases import OUTPUT, Phase, PhaseResult, run_phase

WRITES = "import json, sys; json.dump({'part': 1}, open(sys.argv[1], 'w')); print('written'); "


def program(text: str, limit_s: float = 60.0, **settings: Any) -> Phase:
    return Phase("program", ("-c", text, OUTPUT), limit_s, **settings)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def run(phase: Phase, output: Path, keep: Callable[[PhaseResult], None] = lambda result: None) -> PhaseResult:
    return run_phase(phase, output, phase.limit_s, keep)


def test_passing_phase_has_its_results(output: Path) -> None:
    result = run(program(WRITES), output)
    assert (result.status, result.results, result.last_lines) == ("passed", {"part": 1}, ())
    assert not result.is_partial
    assert 0 < result.wall_s < result.limit_s


def test_failing_phase_keeps_partial_results_and_last_lines(output: Path) -> None:
    result = run(program(WRITES + "raise ValueError('too hot')"), output)
    assert (result.status, result.results, result.is_partial) == ("failed", {"part": 1}, True)
    assert result.reason == "exit status 1"
    assert result.last_lines[0] == "written"
    assert result.last_lines[-1] == "ValueError: too hot"


def test_results_of_an_earlier_phase_are_not_reused(output: Path) -> None:
    output.write_text('{"part": 0}')
    assert run(program("pass"), output).results is None


def test_incomplete_file_is_no_result(output: Path) -> None:
    result = run(program("import sys; open(sys.argv[1], 'w').write('{\"part')"), output)
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
    result = run(program(text, limit_s=3.0), output)
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


def test_environment_of_a_phase_extends_the_parents(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PARENT", "1")
    text = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    found = run(program(text, environment={"OF_THE_PHASE": "2"}), output).results
    assert found is not None
    assert (found["OF_THE_PARENT"], found["OF_THE_PHASE"]) == ("1", "2")
    assert "OF_THE_PHASE" not in os.environ


def test_killed_phase_keeps_what_it_wrote(output: Path) -> None:
    """SIGKILL is what a process gets if the machine has no memory left."""
    text = (
        "import os, pathlib, signal, sys; pathlib.Path(sys.argv[1]).write_text('{\"part\": 1}'); "
        "print('written', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = run(program(text), output)
    assert (result.status, result.reason) == ("killed", "ended by SIGKILL")
    assert (result.results, result.is_partial) == ({"part": 1}, True)
    assert result.last_lines == ("written",)


def test_phase_that_cannot_run_here_is_skipped_with_its_reason(output: Path) -> None:
    text = "import json, sys; json.dump({'skipped_because': 'no GPU'}, open(sys.argv[1], 'w'))"
    result = run(program(text), output)
    assert (result.status, result.reason, result.results) == ("skipped", "no GPU", None)


def test_results_are_kept_while_the_phase_runs(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The phase waits until its first results have been kept, and then writes others."""
    monkeypatch.setattr(phases, "_POLL_S", 0.02)
    seen = output.with_name("seen")
    text = (
        "import json, pathlib, sys, time; file = pathlib.Path(sys.argv[1]); file.write_text(json.dumps({'part': 1}))\n"
        f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)\n"
        "file.write_text(json.dumps({'part': 2}))"
    )
    kept: list[PhaseResult] = []

    def keep(result: PhaseResult) -> None:
        kept.append(result)
        if result.results is not None:
            seen.touch()

    assert run(program(text), output, keep).results == {"part": 2}
    assert {result.status for result in kept} == {"unfinished"}
    assert (kept[0].results, kept[0].is_partial) == (None, False)
    assert (kept[1].results, kept[1].is_partial) == ({"part": 1}, True)
