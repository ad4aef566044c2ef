"""The memory of a GPU while a runner prepares: how much is free, how little was at times, and errors when none is.

Other processes, the driver and torch's allocator all take memory, so it is the device that is asked, not torch alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from executor.errors import OutOfMemory


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    def settle(self) -> int:
        """Gives back memory that is only cached, and returns what is free now. The next `least_free` begins here."""
        ...

    def least_free(self) -> int:
        """Returns the least that has been free at any time since `settle`."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """The memory of a GPU."""

    device: torch.device

    def settle(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self._free()

    def least_free(self) -> int:
        """Subtracts what torch has taken and already given back from what is free now."""
        torch.cuda.synchronize(self.device)
        returned = torch.cuda.max_memory_reserved(self.device) - torch.cuda.memory_reserved(self.device)
        return self._free() - returned

    def _free(self) -> int:
        free_bytes: int = torch.cuda.mem_get_info(self.device)[0]
        return free_bytes


_MESSAGES = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether this error, or one that it was raised in place of, says that the device has no memory left.

    torch's allocators raise OutOfMemoryError for a GPU and a RuntimeError for the CPU, numpy and `kernels.memory` a
    MemoryError. The driver, cuBLAS and Triton raise a RuntimeError with one of these messages; and ending a capture
    that has failed for lack of memory can raise an error that hides the first one.
    """
    while error is not None:
        text = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES):
            return True
        error = error.__context__
    return False


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turns an error about too little memory into OutOfMemory with a text that says what did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error) or "out of memory"  # Python's own MemoryError says nothing
        raise OutOfMemory(f"{what}: {reason.splitlines()[0]}") from None
