"""The measurement of structured output on a small scale; no times are checked."""

import json
from pathlib import Path

import pytest

from bench.overhead import structured_cost

pytestmark = pytest.mark.exhaustive


def test_both_kinds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    services = ["--num-threads", "1", "--max-model-len", "256"]  # the trace scales with the model's length
    structured_cost.main(["--clients", "2", "--requests", "4", "--rounds", "2", "--json", str(path), *services])
    report = json.loads(path.read_text())
    assert len(report["rounds"]) == 2
    assert all(each["plain"] > 0 and each["structured"] > 0 for each in report["rounds"])
    assert "of that without (median)" in capsys.readouterr().out
