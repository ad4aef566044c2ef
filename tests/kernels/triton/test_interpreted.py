"""Runs the tests of this directory in Triton's interpreter, for machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreted import run_interpreted

pytestmark = pytest.mark.exhaustive


@pytest.mark.timeout(1800)
def test_kernels_pass_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).parent, "attention elementwise kv work sampling")
