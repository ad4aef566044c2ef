"""Each row of the threat table names a bound, a metric and a test, and what it names exists."""

import re

import pytest

from bench.attacks.attacks import ATTACKS
from scheduler.core import FinishReason
from scheduler.telemetry.limits import NUM_LIMITED
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "security.md"
HEADER = "| attack | without the bound | bound | where it shows | test |"
TABLE = PAGE.read_text(encoding="utf-8").split(HEADER)[1].split("\n\n")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.split("\n")[2:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_names_a_bound_a_metric_and_a_test(row: list[str]) -> None:
    _, effect, bound, metric, tests = row
    assert effect
    assert bound
    assert "`quire_" in metric or metric == "none: nothing is refused"
    files = re.findall(r"\[(test_\w+\.py)\]\(\.\./(tests/[\w/]+\.py)\)", tests)
    assert files
    for name, path in files:
        assert path.endswith(f"/{name}")
        assert re.search(r"^(async )?def test_", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_labels_and_the_attacks_that_the_table_names_exist() -> None:
    assert len(ROWS) >= 25
    assert set(re.findall(r'\{limit="(\w+)"\}', TABLE)) == set(NUM_LIMITED)
    assert set(re.findall(r'\{reason="(\w+)"\}', TABLE)) <= {reason.value for reason in FinishReason}
    assert set(re.findall(r"--only ([\w-]+)", TABLE)) <= set(ATTACKS)


def test_the_tests_that_the_page_names_are_in_the_files_it_names() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    named = re.findall(r"`(test_\w+)` in \[\w+\.py\]\(\.\./([\w/]+\.py)\)", text)
    assert len(named) >= 2
    for name, path in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
