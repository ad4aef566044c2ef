"""Results of measurements in this process say on which machine, and when, they were measured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.overhead import sampling_cost, scheduler_cost


@pytest.mark.parametrize(
    ("measure", "flags"),
    [(scheduler_cost.main, ["4"]), (sampling_cost.main, ["--num-sequences", "4", "--num-steps", "2"])],
)
def test_results_name_machine_and_date(measure: Callable[[list[str]], None], flags: list[str], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    measure([*flags, "--json", str(output)])
    assert {"device", "date", "versions"} <= json.loads(output.read_text())["machine"].keys()
