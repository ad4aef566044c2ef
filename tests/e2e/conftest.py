from collections.abc import Generator, Iterator

import pytest

from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Undisturbed


@pytest.fixture(scope="session")
def shared_stack() -> Iterator[Stack]:
    """Starts a server for tests that leave no running and no waiting requests behind."""
    with Stack() as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The shared server; its log is shown if the test fails."""
    shared_stack.show_log()
    return shared_stack


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """Known outcomes for the tests of a module, whose servers all give the same ones."""
    return Undisturbed()


@pytest.fixture(autouse=True)
def _logs_of_this_test_alone() -> None:
    Stack.recent.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for stack in Stack.recent:
            for process in stack.processes:
                report.sections.append((f"{process.name}, process {process.pid}", process.log()))
    return report
