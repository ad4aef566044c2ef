"""What a step tells the device: some arrays, packed into one pinned buffer and sent with one copy.

    buffer   │ int32 … │ float32 … │ int64 … │        each at a multiple of 16 bytes, as kernels were compiled for

Buffers are used in turn: the copy from one may still be under way while the next is filled.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.accelerator import Accelerator, Mark

Arrays = dict[str, NDArray[Any]]
"""By name. Names are those of whoever reads them on the device."""

_NUM_BUFFERS = 4
_ALIGNMENT = 16
_FIRST_BYTES = 1 << 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Upload:
    """Buffers grow with what is sent: rarely, and at first."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers = [accelerator.host_bytes(_FIRST_BYTES) for _ in range(_NUM_BUFFERS)]
        self._sent: list[Mark | None] = [None] * _NUM_BUFFERS
        self._next = 0

    def send(self, arrays: Arrays) -> dict[str, Tensor]:
        """The same arrays, int32, int64 or float32, on the device.

        Waits until the buffer is free again: its copy is the fourth last, and long done.
        """
        offsets, total = _layout(arrays)
        which, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
        if (sent := self._sent[which]) is not None:
            sent.wait()
        if total > len(self._buffers[which]):
            self._buffers[which] = self._accelerator.host_bytes(2 * total)
        host = self._buffers[which][:total]
        place = host.numpy()
        for name, array in arrays.items():
            if array.size:
                place[offsets[name] : offsets[name] + array.nbytes] = (
                    np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                )
        on_device = self._accelerator.send(host)
        self._sent[which] = self._accelerator.mark()
        return {
            name: on_device[offsets[name] : offsets[name] + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for name, array in arrays.items()
        }


def _layout(arrays: Arrays) -> tuple[dict[str, int], int]:
    """Where each array begins, and how many bytes all take."""
    offsets, total = {}, 0
    for name, array in arrays.items():
        offsets[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total
