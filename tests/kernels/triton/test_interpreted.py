"""Runs the tests of this directory in Triton's interpreter, for machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreted import run_interpreted

pytestmark = pytest.mark.exhaustive


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ["attention", "elementwise kv work", "sampling"])
def test_kernels_pass_in_the_interpreter(names: str) -> None:
    run_interpreted(Path(__file__).parent, names)
