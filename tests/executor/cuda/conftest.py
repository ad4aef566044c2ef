"""Runs these tests on a GPU or in the interpreter, like those of the kernels: see `tests.kernels.triton.conftest`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from executor.cuda.accelerator import accelerator_for
from tests.support.cuda.runner_pair import DEVICE, Pair, make_pair, settle
from tests.support.triton.interpreter import IS_INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.cuda.accelerator import Accelerator

IN_THE_INTERPRETER = [
    "test_runner.py",
    "test_reports.py",
    "test_followed_grammars.py",
    "test_device_sampler.py",
    "test_rows.py",
    "test_late_failures.py",
    "test_loading.py",
    "test_out_of_memory.py",
    "test_repeats.py",
    "test_not_finite.py",
    "test_sanitizer_subset.py",
    "test_written_marks.py",
]

if IS_INTERPRETED:
    collect_ignore = ["test_interpreted.py"]
elif not torch.cuda.is_available():
    collect_ignore = IN_THE_INTERPRETER


@pytest.fixture
def working() -> Iterator[Accelerator]:
    """Lets a test launch kernels itself, on the tests' device and in one stream. Waits for them at the end."""
    accelerator = accelerator_for(DEVICE)
    with accelerator.working():
        yield accelerator
    settle()


@pytest.fixture(scope="session")
def pair(checkpoint) -> Callable[..., Pair]:
    """Returns a function that makes two runners of a named checkpoint."""

    def make(name: str, **settings: object) -> Pair:
        return make_pair(checkpoint(name).directory, DEVICE, **settings)

    return make


if IS_INTERPRETED:
    from tests.support.triton.patches import patch_interpreter

    patch_interpreter()
