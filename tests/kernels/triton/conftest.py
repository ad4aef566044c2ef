"""Selects how these tests run.

On a machine with a GPU they run on it, compiled, in this process. On every machine `test_interpreted.py` also runs them
in Triton's interpreter, in separate processes: TRITON_INTERPRET must be set before triton is first imported and applies
to the whole process.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.triton.interpreter import IS_INTERPRETED, repair_bfloat16

IN_SEPARATE_PROCESSES = ["test_interpreted.py", "test_compiles.py"]

if IS_INTERPRETED:
    repair_bfloat16()
    collect_ignore = IN_SEPARATE_PROCESSES
elif not torch.cuda.is_available():
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in IN_SEPARATE_PROCESSES
    ]

if IS_INTERPRETED:
    from tests.support.triton.patches import patch_interpreter

    patch_interpreter()
