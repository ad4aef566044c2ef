"""The measurement of the gateway on a small scale; no times are checked."""

import json
from pathlib import Path

import pytest

from bench.overhead import gateway_cost

pytestmark = pytest.mark.exhaustive


def test_both_kinds_of_client_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    services = ["--num-threads", "1", "--max-model-len", "256"]  # the trace scales with the model's length
    gateway_cost.main(["--clients", "2", "--requests", "4", "--rounds", "2", "--json", str(path), *services])
    report = json.loads(path.read_text())
    assert len(report["rounds"]) == 2
    for each in report["rounds"]:
        assert min(each[kind]["tokens_per_s"] for kind in ("grpc", "http")) > 0
        assert each["tokens_per_chunk"] > 0
        assert each["us_per_chunk"] > 0
        assert each["open_us_per_chunk"] > 0
    assert "of the rate over gRPC" in capsys.readouterr().out
