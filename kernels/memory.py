"""Memory for what is large and stays: KV pools, packed weights, activations."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading

import torch

_HUGE_BYTES = 1 << 21
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_POPULATE_BYTES = 16 << 20


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


def populate_in_background(tensor: torch.Tensor) -> threading.Thread:
    """Takes the pages of a tensor of `zeros` from the system ahead of their first use, with time that nobody needs.

    A first write waits until the system has found and cleared a page, which may take as long as a layer's whole
    attention. What the tensor holds is not touched; where the system cannot do this, nothing happens.
    """
    thread = threading.Thread(target=_populate, args=(tensor,), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(tensor: torch.Tensor) -> None:
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        return
    page_bytes = mmap.PAGESIZE
    start = tensor.data_ptr() // page_bytes * page_bytes
    stop = tensor.data_ptr() + tensor.nbytes
    while start < stop:
        num_bytes = min(_POPULATE_BYTES, -(-(stop - start) // page_bytes) * page_bytes)
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _POPULATE_WRITE):
            return
        start += num_bytes
