"""Where these tests run.

On a machine with a GPU: on it, compiled, in this process. Anywhere else, and there too: in Triton's interpreter, in
processes of their own (`test_interpreted.py`), because TRITON_INTERPRET has to be set before triton is first imported,
and holds for all of the process.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.kernels.conftest import _one_thread, _seeded  # noqa: F401  # fixtures that every test here uses

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IN_PROCESSES_OF_THEIR_OWN = ["test_interpreted.py", "test_compiles.py"]

if IS_INTERPRETED:
    collect_ignore = IN_PROCESSES_OF_THEIR_OWN
elif not torch.cuda.is_available():
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in IN_PROCESSES_OF_THEIR_OWN
    ]
