"""A plugin of pytest that writes each test's outcome as it ends, so that it counts whatever becomes of the rest.

    pytest -p bench.outcomes --outcomes FILE

FILE gets a line a test: passed, failed or skipped, a blank, and its name.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from io import TextIOWrapper


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="the file that gets a line a test")


class _Outcomes:
    def __init__(self, file: "TextIOWrapper") -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of a test's three stages, those that decide: its call, and whatever keeps it from being called."""
        if report.when == "call" or report.outcome != "passed":
            print(report.outcome, report.nodeid, file=self._file, flush=True)

    def pytest_unconfigure(self) -> None:
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # workers of xdist tell the process that has them
        config.pluginmanager.register(_Outcomes(path.open("w", encoding="utf-8")))
