"""Marks the tests of the benchmarks as exhaustive: no user of a server depends on them."""

import pytest

from tests.conftest import BENCHMARKS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(BENCHMARKS):
            item.add_marker(pytest.mark.exhaustive)
