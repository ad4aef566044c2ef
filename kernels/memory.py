"""Memory for what is large and stays: KV pools, packed weights, activations."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_HUGE_BYTES = 1 << 21
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14


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


def populate(tensor: torch.Tensor) -> Iterator[None]:
    """Takes the pages of a tensor of `zeros` from the system ahead of their first use, one huge page a turn.

    A first write waits until the system has found and cleared a page, which takes half a millisecond, and several where
    a virtual machine has to ask its host. tensor[rows, ...] is walked through in all rows at once, beginnings first: of
    a pool of KV blocks, a row a layer, the first blocks are used first. What the tensor holds is not touched; where the
    system cannot do this, there are no turns.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return
    row_bytes = tensor[0].nbytes if len(tensor) else 0
    for offset in range(0, row_bytes, _HUGE_BYTES):
        for row in range(len(tensor)):
            start = (tensor.data_ptr() + row * row_bytes + offset) // mmap.PAGESIZE * mmap.PAGESIZE
            stop = tensor.data_ptr() + row * row_bytes + min(offset + _HUGE_BYTES, row_bytes)
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _POPULATE_WRITE):
                return
            yield
