"""Runs tests in Triton's interpreter.

They run in processes of their own: TRITON_INTERPRET has to be set before triton is first imported, and holds for the
whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run_interpreted(directory: Path, names: str) -> None:
    """Runs test_NAME.py of a directory for each of the names. Fails with the output of pytest."""
    files = [str(directory / f"test_{name}.py") for name in names.split()]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
