"""Memory for what is large and stays: KV pools, packed weights, activations."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE_BYTES = 1 << 21


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages are taken from the system when they are first written.

    Where the system has them, its pages are huge ones (2 MiB): a step over scattered KV blocks and all weights touches
    thousands of small pages, and would spend a good part of its time on looking them up. Raises MemoryError.
    """
    num_numbers = math.prod(shape)
    if num_numbers == 0:
        return torch.zeros(shape, dtype=dtype)
    num_bytes = num_numbers * dtype.itemsize
    try:
        memory = mmap.mmap(-1, -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes: {error.strerror or error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_numbers).view(shape)
