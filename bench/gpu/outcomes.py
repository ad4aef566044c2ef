"""A pytest plugin that writes the outcome of each test as it ends, so that it counts even if the run is cut off.

    pytest -p bench.gpu.outcomes --outcomes FILE

Each line of FILE is a JSON object: the outcome (passed, failed or skipped), the name of the test, and the first line of
the error of a failure.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from io import TextIOWrapper

_MAX_REASON_CHARACTERS = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file of outcomes, one line for each test")


class _Outcomes:
    def __init__(self, file: "TextIOWrapper") -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the stage that decides about a test: its call, or a set-up that failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            values = {"outcome": report.outcome, "name": report.nodeid}
            if report.outcome == "failed":
                values["reason"] = _reason(report)
            print(json.dumps(values), file=self._file, flush=True)

    def pytest_unconfigure(self) -> None:
        self._file.close()


def _reason(report: pytest.TestReport) -> str:
    """Returns the first line of the error, which names the exception."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:_MAX_REASON_CHARACTERS]


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # xdist workers report to their main process
        config.pluginmanager.register(_Outcomes(path.open("w", encoding="utf-8")))
