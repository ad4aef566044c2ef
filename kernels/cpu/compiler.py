"""Compiles functions to C functions, once per machine: numba keeps the results in files.

A compiled function takes one pointer, or plain numbers, and never calls Python, so any thread can run it. Parameters of
the model (the size of a head, how numbers are stored) are closure variables, which the compiler treats as constants;
numba caches each combination of closure values separately.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numba

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

types: Any = numba.types  # Any, because few of numba's functions have type annotations

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_REORDER = {"reassoc", "contract", "nsz"}

JOB = types.void(types.int64)
"""The signature of a kernel. Its argument is the address of its job, a record in memory."""

_settings: Any = numba.config
_GIVEN = _settings.CACHE_DIR  # NUMBA_CACHE_DIR
_PREFIX = "kernels-"
_UNUSED_S = 7 * 86_400.0
"""Directories of other sources are removed if no process has used them for this time."""

_LOCK_S = 120.0
"""The compilation of a kernel takes a few seconds. A process that holds the lock for longer is perhaps stopped."""


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
    fastmath = _REORDER if reorder else False

    def make(is_cached: bool) -> Any:
        return numba.cfunc(signature, cache=is_cached, fastmath=fastmath, error_model="numpy")(function)

    with _locked_cache() as is_usable:
        if is_usable:
            try:
                return make(True)
            except OSError:  # the disk is full, or the directory has been removed
                pass
        return make(False)


@contextmanager
def _locked_cache() -> Iterator[bool]:
    """Gives this process numba's cache alone. Yields False if it cannot be used.

    Of processes that start at once, one compiles and the others wait for its result. Without the lock, one could also
    be given the code of another variant: numba numbers the variants of a function in an index, saves the index before
    the code, and does not check which variant it reads.
    """
    directory = _directory()
    try:
        lock = None if directory is None else (directory / "lock").open("w")
    except OSError:
        lock = None
    if lock is None:
        yield False
        return
    _settings.CACHE_DIR = str(directory)
    with lock:
        ends_s = time.monotonic() + _LOCK_S
        while not (is_locked := _try_to_lock(lock.fileno())) and time.monotonic() < ends_s:
            time.sleep(0.05)
        yield is_locked


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@cache
def _directory() -> Path | None:
    """Returns the directory of the cache, or None if there is none that can be written.

    Other sources of any kernel have another directory. numba looks only for changes in the file of the compiled
    function, not in those of the functions it calls. After a change it saves a new index, and then new code in the
    files of the old; a process that was killed in between would leave the old code under the new index.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "quire")
    for each in [Path(_GIVEN)] if _GIVEN else [Path(__file__).parent / "__pycache__", user]:
        try:
            base = each.expanduser()
            directory = base / f"{_PREFIX}{_sources_digest(Path(__file__).parent)}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "lock").touch()
        except (OSError, RuntimeError):  # RuntimeError: this user has no home directory
            continue
        _remove_unused(base)
        return directory
    return None


def _sources_digest(package: Path) -> str:
    """Returns a digest of the source of every module in a directory."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _remove_unused(base: Path) -> None:
    for lock in base.glob(f"{_PREFIX}*/lock"):
        try:
            if time.time() - lock.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # another process has removed it
            continue
