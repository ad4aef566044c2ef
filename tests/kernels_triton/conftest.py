"""Where these tests run.

On a machine with a GPU: on it, compiled, in this process. Anywhere else, and there too: in Triton's interpreter, in
processes of their own (`test_interpreted.py`), because TRITON_INTERPRET has to be set before triton is first imported,
and holds for all of the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IN_PROCESSES_OF_THEIR_OWN = ["test_interpreted.py", "test_compiles.py"]

if IS_INTERPRETED:
    collect_ignore = IN_PROCESSES_OF_THEIR_OWN
elif not torch.cuda.is_available():
    collect_ignore = ["test_attention.py", "test_elementwise.py", "test_kv.py", "test_work.py"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
