"""Large memory: zeros, aligned, and populated without touching what is there."""

from __future__ import annotations

import resource

import torch

from kernels.memory import populate_in_background, zeros


def test_zeros_of_any_shape() -> None:
    for shape in [(0,), (3, 0, 2), (5,), (300, 7, 1000)]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = zeros(shape, dtype)
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert not tensor.any()
            assert tensor.is_contiguous()


def test_it_outlives_its_maker_and_can_be_written() -> None:
    tensor = zeros((1000, 1000), torch.float32)[10:20]
    tensor += 1
    assert tensor.sum() == 10_000


def test_populating_takes_pages_and_changes_nothing() -> None:
    tensor = zeros((24 << 20,), torch.uint8)
    tensor[5 << 20] = 7
    populate_in_background(tensor).join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert tensor[5 << 20] == 7
    tensor += 1  # every page is there already: hardly a fault, where small pages alone would make 6,144
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2_000
    assert tensor[0] == 1
    assert tensor[5 << 20] == 8
