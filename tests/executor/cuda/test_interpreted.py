"""The tests of this directory in Triton's interpreter: the GPU's runner on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ["runner", "reports", "device_sampler rows late_failures"])
def test_in_the_interpreter(names: str) -> None:
    files = [str(HERE / f"test_{name}.py") for name in names.split()]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=HERE.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
