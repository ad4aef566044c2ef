"""How kernels are declared here.

Their parameters are annotated as tl.tensor, whether addresses, numbers or tiles (blocks of either, held in the
registers of a program's threads): that is what Triton makes of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import triton


def kernel(*, unspecialized: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Declares a function that runs on the device: launched as `name[grid](…)`, or called by other kernels.

    Triton compiles a variant for each class of an argument: an integer 1, a multiple of 16, another; an address that
    is a multiple of 16 bytes or is not. `unspecialized` names the arguments for which that would bring nothing but a
    compilation in the middle of serving: counts, and tables read one number at a time.
    """

    def declare(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(unspecialized))

    return declare


def padded(size: int) -> int:
    """The extent of a tile that holds `size` numbers: tiles have powers of two."""
    return int(triton.next_power_of_2(size))
