"""The decorator that declares kernels.

Parameters of kernels are annotated as tl.tensor, because Triton makes tensors of addresses, numbers and tiles (blocks
of either, held in the registers of a program's threads) alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton


def kernel(*, unspecialized: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Declares a function that runs on the device: launched as `name[grid](…)`, or called by other kernels.

    Triton compiles a variant for each class of an argument: an integer that is 1, a multiple of 16, or neither; an
    address that is a multiple of 16 bytes or not. `unspecialized` names the arguments for which variants gain nothing
    and would only cause compilation while serving: counts, and tables that are read one number at a time.
    """

    def declare(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(unspecialized))

    return declare


def padded(size: int) -> int:
    """Returns the extent of a tile that holds `size` numbers; extents are powers of two."""
    return int(triton.next_power_of_2(size))
