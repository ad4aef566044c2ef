"""Runs a compiled kernel on the threads of torch's own OpenMP runtime.

numba's OpenMP layer links its own runtime; two thread pools would then compete for the same cores: each spins while the
other works. This module uses the threads that torch's operators use, which are already running; `torch.set_num_threads`
sets their number. Every thread calls the kernel with the address of the same job, and takes units of work by counting
up the job's ticket.

If torch was built with another runtime (macOS), Python threads run the kernels instead.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# void GOMP_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags)
_Launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_Alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_Brief = ctypes.PYFUNCTYPE(None, ctypes.c_int64)  # keeps Python's global interpreter lock


def _find_launch() -> Callable[[int, int, int, int], None] | None:
    """Returns GOMP_parallel of the OpenMP runtime that torch is linked with, or None."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return _Launch(("GOMP_parallel", ctypes.CDLL(str(library))))
    except (OSError, AttributeError):
        return None


def _find_sleep() -> int:
    """Returns the address of usleep, or 0 if the C library has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


_launch = _find_launch()
_sleep = _find_sleep()
_python_threads: list[ThreadPoolExecutor] = []


class Job(threading.local):
    """The record of one call to a kernel: int64 fields, then float64 fields; each calling thread has its own memory.

    The first field is always `ticket`, the next unit of work that no thread has taken; kernels count it up. Compiled
    code reads the record as `carray(pointer(address), (1,), DTYPE)[0]`, with the global DTYPE from `job_dtype`.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        kinds = [field[0] for field in (dtype.fields or {}).values()]
        self._num_fields = len(kinds) - 1
        self._in_order = itemgetter(*(dtype.names or ()))
        self._struct = struct.Struct("".join("q" if kind == np.int64 else "d" for kind in kinds))
        self._memory = ctypes.create_string_buffer(self._struct.size)
        self._address = ctypes.addressof(self._memory)

    def fill(self, **fields: float) -> int:
        """Writes the fields by name, sets `ticket` to 0, and returns the address of the record.

        Compiled code checks no number: an address in place of a count would overwrite arbitrary memory. Names prevent
        that and cost about 1.5 µs for the largest job. Raises TypeError if a field of the layout is missing, or if
        there are others.
        """
        if len(fields) != self._num_fields:
            raise TypeError(f"a job of {self._num_fields} fields was given {len(fields)}: {', '.join(fields)}")
        fields["ticket"] = 0
        try:
            self._struct.pack_into(self._memory, 0, *self._in_order(fields))
        except KeyError as error:
            raise TypeError(f"a job lacks its field {error}") from None
        return self._address


def job_dtype(integers: str, floats: str = "") -> np.dtype[np.void]:
    """Returns the layout of a job, given the names of its fields after `ticket`."""
    fields: list[tuple[str, Any]] = [(name, np.int64) for name in ("ticket " + integers).split()]
    return np.dtype(fields + [(name, np.float64) for name in floats.split()])


def sleep_function() -> int:
    """Returns the address of a C function `int(unsigned)` that sleeps for some microseconds, or 0 if there is none."""
    return _sleep


class Kernel:
    """A compiled kernel, which one thread or the team runs."""

    __slots__ = ("_address", "_alone", "_brief", "_compiled")

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # owns the machine code
        self._address: int = compiled.address
        self._alone = _Alone(self._address)
        self._brief = _Brief(self._address)

    @property
    def address(self) -> int:
        """The address of the machine code, which lives as long as this object."""
        return self._address

    def run_brief(self, job: int) -> None:
        """Runs the whole job on the calling thread; for jobs that end before another thread could start.

        Keeps Python's global interpreter lock: a thread that releases it for microseconds may wait milliseconds to get
        it back.
        """
        self._brief(job)

    def run_in_team(self, job: int) -> None:
        """Runs the job on `torch.get_num_threads()` threads, including the calling one; returns when all are done."""
        num_threads = torch.get_num_threads()
        if num_threads == 1:
            self._alone(job)
        elif _launch is not None:
            _launch(self._address, job, num_threads, 0)
        else:
            self._run_in_python_threads(job, num_threads)

    def _run_in_python_threads(self, job: int, num_threads: int) -> None:
        if not _python_threads:
            _python_threads.append(ThreadPoolExecutor(thread_name_prefix="kernels"))
        others = [_python_threads[0].submit(self._alone, job) for _ in range(num_threads - 1)]
        self._alone(job)
        wait(others)
