"""Sends arrays to the device: they are packed into one pinned buffer and travel with one copy.

    buffer   │ int32 … │ float32 … │ int64 … │        each at a multiple of 16 bytes, as kernels were compiled for

Buffers are used in turn: the copy from one may still be under way while the next is filled.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.accelerator import Accelerator, Mark
from executor.cuda.retry import with_room

_NUM_BUFFERS = 4
_ALIGNMENT = 16
_FIRST_BYTES = 1 << 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Upload:
    """Pinned buffers that grow with what is sent: rarely, and mostly at the start."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers = [accelerator.host_bytes(_FIRST_BYTES) for _ in range(_NUM_BUFFERS)]
        self._sent: list[Mark | None] = [None] * _NUM_BUFFERS
        self._next = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Returns the same arrays, int32, int64 or float32, on the device.

        Waits until a buffer is free again. Its copy was started three sends ago, so it is nearly always done.
        """
        offsets, total = _layout(arrays)
        which, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
        if (sent := self._sent[which]) is not None:
            sent.wait()
        if total > len(self._buffers[which]):
            self._buffers[which] = self._accelerator.host_bytes(2 * total)
        host = self._buffers[which][:total]
        target = host.numpy()
        for offset, array in zip(offsets, arrays, strict=True):
            if array.size:
                target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = with_room(self._accelerator, lambda: self._accelerator.send(host))
        self._sent[which] = self._accelerator.mark()
        return [
            on_device[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]


def _layout(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Returns the offset of each array in the buffer, and the number of bytes that all of them take."""
    offsets, total = [], 0
    for array in arrays:
        offsets.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total
