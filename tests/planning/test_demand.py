"""The requests that settings describe, with their lengths from a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from planning.demand import find_demand
from planning.errors import PlanningError
from planning.records import Records
from planning.run import simulate
from planning.settings import SimulateSettings

FIXED = {"prompt_tokens": 50, "output_tokens": 20}


def write_requests(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(**settings: Any) -> Records:
    return simulate("qwen3-0.6b", SimulateSettings(**settings)).records


@pytest.mark.parametrize(
    "arrivals", [{"rate": 5.0}, {"rate": 5.0, "burstiness": 4.0}, {"rate": 5.0, "daily_swing": 0.5}]
)
def test_listed_requests_without_times_arrive_at_the_rate(tmp_path: Path, arrivals: dict[str, float]) -> None:
    """They arrive when drawn requests do."""
    listed = run(lengths=write_requests(tmp_path, *[FIXED] * 30), **arrivals)
    drawn = run(lengths="fixed", num_requests=30, **FIXED, **arrivals)
    assert list(listed.requests.arrival_s) == list(drawn.requests.arrival_s)
    assert list(listed.requests.end_s) == list(drawn.requests.end_s)


def test_listed_requests_without_times_and_rate_arrive_at_once(tmp_path: Path) -> None:
    records = run(lengths=write_requests(tmp_path, *[FIXED] * 30))
    assert set(records.requests.arrival_s) == {0.0}


def test_more_clients_than_the_default_number_of_requests_can_send_listed_requests(tmp_path: Path) -> None:
    path = write_requests(tmp_path, *[FIXED] * 3)
    assert find_demand(SimulateSettings(lengths=path, clients=2000), 8192).horizon.num_requests == 3


def test_the_priority_of_listed_requests_orders_them(tmp_path: Path) -> None:
    """The first to arrive is planned at once, and the others wait for its slot."""
    lines = [{"prompt_tokens": 10 + i, "output_tokens": 5, "priority": 9 - i} for i in range(10)]
    records = run(lengths=write_requests(tmp_path, *lines), policy="priority", max_num_seqs=1)
    assert list(records.requests.num_prompt_tokens) == [10, *range(19, 10, -1)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rate": -3.0}, "rate and burstiness"),
        ({"rate": 1.0, "clients": 2}, "give either clients"),
        ({"clients": 0}, "clients: from 1 to"),
        ({"clients": 4, "turnaround_s": -5.0}, "turnaround_s"),
        ({"turnaround_s": 1.0}, "turnaround_s: requires clients"),
        ({"burstiness": 4.0}, "burstiness: requires a rate"),
        ({"clients": 4, "daily_swing": 0.5}, "daily_swing: requires a rate"),
        ({"clients": 4, "system_tokens": 1000}, "system_tokens: has no effect"),
        ({"rate": 1.0, "prompt_tokens": 10}, "prompt_tokens: has no effect"),
    ],
)
def test_settings_that_listed_requests_leave_no_use_for_are_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    path = write_requests(tmp_path, FIXED)
    with pytest.raises(PlanningError, match=problem):
        find_demand(SimulateSettings(lengths=path, **settings), 8192)


def test_a_rate_for_requests_with_times_is_refused(tmp_path: Path) -> None:
    path = write_requests(tmp_path, FIXED | {"arrival_s": 0.0})
    with pytest.raises(PlanningError, match="times of their own"):
        find_demand(SimulateSettings(lengths=path, rate=1.0), 8192)
