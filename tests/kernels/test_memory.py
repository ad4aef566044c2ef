"""Memory for large tensors: zeros, aligned, and populated without changing their values."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from kernels.memory import populate, zeros


def test_zeros_can_have_any_shape() -> None:
    for shape in [(0,), (3, 0, 2), (5,), (300, 7, 1000)]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = zeros(shape, dtype)
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert not tensor.any()
            assert tensor.is_contiguous()


def test_the_memory_lives_as_long_as_the_tensor_and_is_writable() -> None:
    tensor = zeros((1000, 1000), torch.float32)[10:20]
    tensor += 1
    assert tensor.sum() == 10_000


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here")
def test_large_tensors_have_huge_pages() -> None:
    tensor = zeros((16, 2 << 20), torch.uint8)
    before_kib = _huge_kib()
    tensor += 1
    assert _huge_kib() - before_kib >= 15 * 2048, "the first one may not begin at a multiple of 2 MiB"


def test_populating_takes_pages_and_changes_no_values() -> None:
    tensor = zeros((3, 8 << 20), torch.uint8)
    tensor[1, 5 << 20] = 7
    assert sum(1 for _ in populate(tensor)) == 12
    before = _faults()
    assert tensor[1, 5 << 20] == 7
    tensor += 1  # pages exist already, so there are hardly any faults; small pages alone would cause 6,144
    assert _faults() - before < 2_000
    assert tensor[0, 0] == 1
    assert tensor[1, 5 << 20] == 8


def test_populating_begins_with_the_first_page_of_every_row() -> None:
    tensor = zeros((4, 8 << 20), torch.uint8)
    turns = populate(tensor)
    for _ in tensor:
        next(turns)
    before = _faults()
    tensor[:, : 2 << 20] += 1
    assert _faults() - before < 700
    turns.close()


def test_populating_an_empty_tensor_does_nothing() -> None:
    assert not list(populate(zeros((0, 5), torch.uint8)))
    assert not list(populate(zeros((5, 0), torch.uint8)))


def _huge_kib() -> int:
    """Returns the memory of this process in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
