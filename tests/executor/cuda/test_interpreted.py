"""Runs the tests of this directory in Triton's interpreter: the GPU's runner on machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreted import run_interpreted

pytestmark = pytest.mark.exhaustive


# One process for all files: each would load torch and make the checkpoints anew. Each test keeps its own time-out.
FILES = (
    "runner rows not_finite followed_grammars reports device_sampler late_failures loading out_of_memory repeats "
    "sanitizer_subset written_marks"
)


@pytest.mark.timeout(2400)
def test_the_runner_passes_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).parent, FILES)
