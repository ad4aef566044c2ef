"""Compiles functions to C functions, once per machine: numba caches the results in __pycache__ beside each module.

A compiled function takes one pointer, or plain numbers, and never calls Python, so any thread can run it. Parameters of
the model (the size of a head, how numbers are stored) are closure variables, which the compiler treats as constants;
numba caches each combination of closure values separately.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

types: Any = numba.types  # Any, because few of numba's functions have type annotations

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_REORDER = {"reassoc", "contract", "nsz"}

JOB = types.void(types.int64)
"""The signature of a kernel. Its argument is the address of its job, a record in memory."""


@overload
def inlined(function: _Function) -> _Function: ...
@overload
def inlined(*, reorder: bool) -> Callable[[_Function], _Function]: ...
def inlined(function: _Function | None = None, *, reorder: bool = False) -> Any:
    """Compiles a function into the kernels that call it, with strict IEEE arithmetic unless `reorder` is set.

    `reorder` has the meaning it has in `compiled`. That of the kernel does not apply to the functions it calls.
    """
    compile_it = numba.njit(nogil=True, error_model="numpy", fastmath=_REORDER if reorder else False)
    return compile_it if function is None else compile_it(function)


def compiled(function: Callable[..., Any], signature: Any = JOB, *, reorder: bool = False) -> Any:
    """Compiles `function` to a C function, or takes that from the cache; `.address` is its entry point.

    reorder allows LLVM to add numbers in another order, which it needs in order to vectorize loops that sum.
    """
    make = numba.cfunc(signature, cache=True, fastmath=_REORDER if reorder else False, error_model="numpy")
    return make(function)


def _sources_digest() -> int:
    """Returns a digest of the source of every module in this package.

    numba's cache checks only the file of the compiled function, not those of the functions it calls. A kernel with this
    number in its closure is compiled again when any of these files has changed.
    """
    digest = hashlib.blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "little")


SOURCES = _sources_digest()
