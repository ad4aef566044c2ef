"""The whole check: which phases run, what each leaves in the folder, and what the summary says."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.commands import COMMANDS
from bench.gpu import check
from bench.gpu.check import gpu_phases, run, select, show, small_phases
from bench.gpu.phases import OUTPUT, Phase, PhaseResult
from bench.gpu.random_models import SHAPES
from bench.gpu.records import folder_name, load_records, save_record
from tests.support.paths import ROOT

CPU = torch.device("cpu")
MAX_PHASE_S = 600.0
WRITES = "import json, sys; json.dump({'part': 1}, open(sys.argv[1], 'w')); "
MACHINE = {"device": "NVIDIA H200", "date": "2026-11-22T12:00:00+00:00"}


def program(name: str, text: str, **settings: Any) -> Phase:
    return Phase(name, ("-c", text, OUTPUT), 60.0, **settings)


def statuses(folder: Path) -> dict[str, str]:
    return {name: record["status"] for name, record in load_records(folder).items()}


def test_every_phase_is_a_command_of_bench() -> None:
    for small, large in zip(small_phases(), gpu_phases(), strict=True):
        assert small.arguments[:3] == large.arguments[:3]
        assert small.name.split()[0] == large.name.split()[0]
        assert small.is_vital == large.is_vital
        assert large.arguments[:2] == ("-m", "bench")
        assert large.arguments[2] in COMMANDS
        assert max(small.limit_s, large.limit_s) < MAX_PHASE_S
        assert small.environment["CUDA_VISIBLE_DEVICES"] == ""
        for phase in (small, large):
            assert phase.name.split()[1:] in (
                [],
                ["tests"],
                ["memcheck"],
                ["racecheck"],
                *([shape] for shape in SHAPES),
            )
    vital = [phase.name for phase in gpu_phases() if phase.is_vital]
    assert vital == ["correctness", "sanitizer memcheck", "sanitizer racecheck", "two_devices tests"]


def test_page_has_the_phases_in_their_order_with_their_limits() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page[page.index("| phase | limit |") :].partition("\n\n")[0].splitlines()[2:]]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[1])]
    assert names == [phase.name for phase in gpu_phases()]
    limits_s = {phase.name: phase.limit_s for phase in gpu_phases()}
    for row in rows:
        stated = [float(number) for number in re.findall(r"(\d+) s", row[2])]
        assert set(stated) == {limits_s[name] for name in re.findall(r"`([^`]+)`", row[1])}


def test_phases_are_selected_by_the_first_words_of_their_names() -> None:
    phases = gpu_phases()
    assert select(phases, "") == phases
    assert [phase.name for phase in select(phases, "end_to_end")] == [
        "end_to_end llama-3.1-8b",
        "end_to_end qwen3-0.6b",
    ]
    assert [phase.name for phase in select(phases, "kernels, correctness")] == ["correctness", "kernels"]
    assert [phase.name for phase in select(phases, "end_to_end qwen3-0.6b")] == ["end_to_end qwen3-0.6b"]


def test_unknown_phase_is_refused_with_the_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        check.main(["--small", "--phase", "correctness,speed", "--output", str(tmp_path)])
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert "'speed'" in written
    assert all(phase.name in written for phase in small_phases())
    assert list(tmp_path.iterdir()) == []


def test_a_phase_that_dies_leaves_the_results_of_the_others(tmp_path: Path) -> None:
    dies = "import os, signal, time; os.kill(os.getpid(), signal.SIGKILL)"
    writes_and_hangs = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('{\"part\": 1}'); time.sleep(600)"
    )
    hangs = Phase("hangs", ("-c", writes_and_hangs, OUTPUT), 2.0)
    phases = [program("first", WRITES), program("dies", dies), hangs, program("last", WRITES)]
    assert run(phases, CPU, float("inf"), tmp_path) is None
    assert statuses(tmp_path) == {"first": "passed", "dies": "killed", "hangs": "cut off", "last": "passed"}
    records = load_records(tmp_path)
    assert [records[name]["results"] for name in ("first", "dies", "hangs", "last")] == [
        {"part": 1},
        None,
        {"part": 1},
        {"part": 1},
    ]
    assert [name for name, record in records.items() if record["is_partial"]] == ["hangs"]


def test_phases_of_separate_calls_add_up(tmp_path: Path) -> None:
    run([program("one", WRITES), program("two", "1 / 0")], CPU, float("inf"), tmp_path)
    run([program("two", WRITES)], CPU, float("inf"), tmp_path)
    assert statuses(tmp_path) == {"one": "passed", "two": "passed"}
    run([program("one", "1 / 0"), program("three", WRITES)], CPU, 0.0, tmp_path)  # no time: they do not start
    assert statuses(tmp_path) == {"one": "passed", "two": "passed"}


@pytest.mark.parametrize(
    ("vital", "other", "expected"),
    [
        ("pass", "1 / 0", True),
        ("1 / 0", "pass", False),
        (None, "pass", None),
        ("import json, sys; json.dump({'skipped_because': 'no GPU'}, open(sys.argv[1], 'w'))", "pass", None),
    ],
)
def test_check_is_correct_if_its_vital_phases_pass(
    vital: str | None, other: str, expected: bool | None, tmp_path: Path
) -> None:
    known = [program("other", other)]
    if vital is not None:
        known.append(program("vital", vital, is_vital=True))
    assert run(known, CPU, float("inf"), tmp_path) is expected


def test_a_check_that_is_killed_leaves_partial_results(tmp_path: Path) -> None:
    """Everything is killed at once, as when a container ends."""
    folder, pid_file = tmp_path / "results", tmp_path / "pid"
    text = (
        "import json, os, pathlib, sys, time; "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); "
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'part': 1})); time.sleep(600)"
    )
    whole = (
        "import pathlib, torch; from bench.gpu import check, phases; phases._POLL_S = 0.02\n"
        f"phase = phases.Phase('long', ('-c', {text!r}, phases.OUTPUT), 600.0)\n"
        f"check.run([phase], torch.device('cpu'), 600.0, pathlib.Path({str(folder)!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", whole], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not load_records(folder).get("long", {}).get("results"):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    record = load_records(folder)["long"]
    assert (record["status"], record["results"], record["is_partial"]) == ("unfinished", {"part": 1}, True)


def test_folder_is_named_after_the_device_and_the_day() -> None:
    assert folder_name(MACHINE, is_small=False) == "nvidia-h200-2026-11-22"
    assert folder_name(MACHINE, is_small=True) == "nvidia-h200-small-2026-11-22"


def test_other_files_of_the_folder_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[1]")
    (tmp_path / "c.json").write_text('{"phase": "c"}')
    save_record(tmp_path, "end_to_end llama-tiny", MACHINE, PhaseResult("passed", 1.0, 2.0, {"part": 1}))
    assert [path.name for path in tmp_path.glob("end*")] == ["end-to-end-llama-tiny.json"]
    assert list(load_records(tmp_path)) == ["end_to_end llama-tiny"]
    assert load_records(tmp_path / "none") == {}


def shown(folder: Path) -> str:
    console = Console(width=200, file=io.StringIO())
    show(load_records(folder), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_summary_shows_failed_tests_and_targets(tmp_path: Path) -> None:
    failure = {"name": "tests/a.py::test_it[float16]", "reason": "AssertionError: 3 rows differ"}
    tests = {"passed": 7, "failed": 1, "skipped": 2, "passed_by_dtype": {"float16": 3}, "failures": [failure]}
    save_record(tmp_path, "correctness", MACHINE, PhaseResult("failed", 9.0, 540.0, tests, "exit status 1", True))
    single = {"single": {"tpot_ms": 4.5}}
    result = PhaseResult("cut off", 300.0, 300.0, single, "not finished after 300 s", is_partial=True)
    save_record(tmp_path, "end_to_end llama-3.1-8b", MACHINE, result)
    text = shown(tmp_path)
    assert "correctness: failed (exit status 1) in 9 s of 540, partial results" in text
    assert "7 passed, 3 in float16; 1 failed, 2 skipped" in text
    assert "tests/a.py::test_it[float16]: AssertionError: 3 rows differ" in text
    (line,) = [line for line in text.splitlines() if line.startswith("8B, b=1")]
    assert "≤ 4.6" in line
    assert "4.5 ✓ partial" in line


def test_summary_of_another_device_has_no_targets(tmp_path: Path) -> None:
    machine = MACHINE | {"device": "NVIDIA L4 [24 GB]"}
    save_record(tmp_path, "environment", machine, PhaseResult("passed", 1.0, 60.0, {"torch": "2.11"}))
    assert "there are no targets for NVIDIA L4 [24 GB]" in shown(tmp_path)
    assert shown(tmp_path / "none") == "no results\n"


def test_records_are_json_without_infinities(tmp_path: Path) -> None:
    run([program("one", WRITES)], CPU, float("inf"), tmp_path)
    record = json.loads((tmp_path / "one.json").read_text(), parse_constant=pytest.fail)
    assert record["machine"]["versions"]["torch"] == torch.__version__
