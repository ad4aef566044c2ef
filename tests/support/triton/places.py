"""The device, the dtypes and the tolerances for tests of the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.paged import Paged
from tests.support.triton.interpreter import IS_INTERPRETED

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
IS_GPU = DEVICE.type == "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

on_gpu_only = pytest.mark.skipif(not IS_GPU, reason="needs a GPU")

# Relative distance from one number of the dtype to the next; float32 has room for another order of additions.
ROUNDING = {torch.float32: 2**-19, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def on_device(pool: Paged) -> Paged:
    """Copies a pool to the device."""
    return Paged(pool.kv.to(DEVICE), pool.block_tables.to(DEVICE), pool.context_lens.to(DEVICE))


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Checks that two tensors differ by at most `roundings` roundings to the dtype; NaN equals NaN."""
    relative = roundings * ROUNDING[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=2e-5, equal_nan=True)


def assert_attended(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Checks results of attention: weights and results are rounded, so the error of a row is proportional to its norm.

    The tolerance is small enough to notice one missing token of 4,000, which is 1 / sqrt(4000) of a random row.
    """
    assert torch.equal(actual.isnan(), expected.isnan())
    wide, wanted = actual.double().nan_to_num(), expected.double().nan_to_num()
    error = (wide - wanted).norm(dim=-1)
    allowed = 2 * ROUNDING[expected.dtype] * wanted.norm(dim=-1)
    worst = (error - allowed).flatten().argmax()
    assert (error <= allowed).all(), f"row {worst}: {error.flatten()[worst]} > {allowed.flatten()[worst]}"
