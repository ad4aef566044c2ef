"""The comparison of routing policies on a small scale; no times are checked."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.serving import routing

pytestmark = pytest.mark.exhaustive


def test_prompts_of_a_group_begin_alike() -> None:
    load = routing.Load(num_requests=200, num_groups=5, num_shared=32, num_own=8)
    requests = routing.trace(load, 1000, 3)
    groups = Counter(request.prompt_token_ids[:32] for request in requests)
    assert len(groups) == 5
    assert max(groups.values()) > 2 * min(groups.values())
    assert len({request.prompt_token_ids for request in requests}) == 200
    assert routing.trace(load, 1000, 3) == requests


@pytest.mark.timeout(600)
def test_policies_take_turns_on_real_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    load = ["--replicas", "2", "--clients", "2", "--requests", "8", "--groups", "2", "--shared", "64", "--rounds", "1"]
    routing.main([*load, "--json", str(path)])
    report = json.loads(path.read_text())
    assert set(report["medians"]) == {"round-robin", "cost"}
    for each in report["medians"].values():
        assert 0 <= each["hit_rate"] < 1
        assert each["tokens_per_s"] > 0
    assert "cost: " in capsys.readouterr().out
