from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Runs kernels on one thread, unless a test sets the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(_one_thread: None) -> None:
    """Runs kernels on a team of two threads."""
    torch.set_num_threads(2)
