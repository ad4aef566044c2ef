"""Compiles functions to C functions, once a machine: numba keeps the results in __pycache__ beside this file's module.

A compiled function takes one pointer, or plain numbers, and never touches Python: any thread may run it. What varies
with a model (the head's size, how numbers are stored) is a constant of the function that is compiled, a closure
variable; numba files each value of the closure on its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

types: Any = numba.types  # so that a checker does not mind how few of numba's functions have annotations

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_REORDER = {"reassoc", "contract", "nsz"}

JOB = types.void(types.int64)
"""The signature of a kernel: the address of its job, a record in memory."""


@overload
def inlined(function: _Function) -> _Function: ...
@overload
def inlined(*, reorder: bool) -> Callable[[_Function], _Function]: ...
def inlined(function: _Function | None = None, *, reorder: bool = False) -> Any:
    """For functions that kernels call: compiled into their callers, floats as IEEE has them.

    reorder as in `compiled`, which says nothing of what its function calls.
    """
    compile_it = numba.njit(nogil=True, error_model="numpy", fastmath=_REORDER if reorder else False)
    return compile_it if function is None else compile_it(function)


def compiled(function: Callable[..., Any], signature: Any = JOB, *, reorder: bool = False) -> Any:
    """The C function of `function`; `.address` is where it starts. Taken from the cache where that has it.

    reorder lets LLVM add numbers in another order, which loops that sum need to run on vectors.
    """
    make = numba.cfunc(signature, cache=True, fastmath=_REORDER if reorder else False, error_model="numpy")
    return make(function)


def _sources_digest() -> int:
    """Names the text of every module here.

    numba looks at the file of the compiled function only, not at those of the functions it calls. A kernel that holds
    this number in its closure is compiled again when any of them has changed.
    """
    digest = hashlib.blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "little")


SOURCES = _sources_digest()
