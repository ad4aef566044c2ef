"""Ceilings of the machine, measured in the same run as the kernels that are compared with them."""

from dataclasses import dataclass

import torch

from bench.machine import cache_bytes
from bench.stopwatch import time_rounds


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates of a device over all repetitions, with the threads that torch has now.

    copy_gb_per_s  rate of a large copy, bytes read plus bytes written
    read_gb_per_s  rate of reading a large tensor
    gemm_tflops    rate of a large matrix product of random numbers through torch, by dtype
    """

    copy_gb_per_s: float
    read_gb_per_s: float
    gemm_tflops: dict[str, float]


def measure_ceilings(device: torch.device, dtypes: tuple[torch.dtype, ...], budget_s: float) -> Ceilings:
    """Measures each rate for about budget_s."""
    # Many times the cache, so that what is left in the cache after a round is negligible.
    num_numbers = 1 << 28 if device.type == "cuda" else max(1 << 24, 8 * cache_bytes(device) // 4)
    source = torch.rand(num_numbers, device=device)
    target = torch.empty_like(source)
    copy = time_rounds(lambda: target.copy_(source), 1, device, budget_s)
    # The maximum needs no rounding, and torch computes it with vector instructions on every device.
    read = time_rounds(source.max, 1, device, budget_s)
    return Ceilings(
        copy_gb_per_s=2 * source.nbytes / copy.best_s / 1e9,
        read_gb_per_s=source.nbytes / read.best_s / 1e9,
        gemm_tflops={str(dtype).removeprefix("torch."): _gemm_tflops(device, dtype, budget_s) for dtype in dtypes},
    )


def _gemm_tflops(device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timing = time_rounds(lambda: left @ right, 1, device, budget_s)
    return 2 * size**3 / timing.best_s / 1e12
