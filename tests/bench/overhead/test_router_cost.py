"""The measurement of the router on a small scale; no times are checked."""

import json
from pathlib import Path

import pytest

from bench.overhead import router_cost

pytestmark = pytest.mark.exhaustive


def test_both_ways_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    flags = ["--clients", "2", "--requests", "6", "--words", "20", "--tokens", "4", "--rounds", "2", "--step-ms", "1"]
    router_cost.main([*flags, "--json", str(path)])
    report = json.loads(path.read_text())
    assert len(report["rounds"]) == 2
    for each in report["rounds"]:
        assert min(each[way]["tokens_per_s"] for way in ("direct", "routed")) > 0
        assert each["routed"]["us_per_token"] > 0
    assert "us of CPU a token" in capsys.readouterr().out
