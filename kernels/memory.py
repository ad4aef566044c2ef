"""Memory for large, long-lived tensors: KV pools, packed weights, activations."""

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
    """Returns a tensor of zeros; the system provides its pages when they are first written.

    A tensor of at least half a huge page (2 MiB) uses huge pages if the system has them: a step over scattered KV
    blocks and all weights touches thousands of small pages, and would spend much of its time on looking up their
    addresses. The mapping is private, because Linux by default gives huge pages to these only. Raises MemoryError.
    """
    num_numbers = math.prod(shape)
    if num_numbers == 0:
        return torch.zeros(shape, dtype=dtype)
    num_bytes = num_numbers * dtype.itemsize
    page_bytes = _HUGE_BYTES if num_bytes >= _HUGE_BYTES // 2 else mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, -(-num_bytes // page_bytes) * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from None
    if page_bytes == _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages uses small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_numbers).view(shape)


def populate(tensor: torch.Tensor) -> Iterator[None]:
    """Requests the pages of a tensor of `zeros` before their first use, one huge page per step of the iterator.

    The first write to a page waits until the system has found and cleared it. That takes half a millisecond, and
    several milliseconds in a virtual machine that has to ask its host. tensor[rows, ...] is populated from the start of
    all rows at once: a KV pool has a row per layer, and its first blocks are used first. The values of the tensor do
    not change. If the system does not support this, the iterator is empty.
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
