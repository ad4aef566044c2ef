"""A whole step as a list of jobs, which a team of threads works off without coming back to Python.

Every thread goes through the jobs in order and takes what units are left. A job is over when all of its units have been
taken and everybody who took part has come out of it; who did not come in is not waited for::

    thread 0  ─norm─┃──── linear ────┃─ rotate, store ─┃── attention ──┃─ … ─┃
    thread 1  ──────┃──── linear ────┃ · · · preempted · · · ── attention ┃─ … ─┃

The list is made once, over buffers that stay where they are. Between two runs a caller changes only what differs from
step to step: numbers of rows, and addresses of what came with the step.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.cpu.compiler import SOURCES, compiled
from kernels.cpu.native import LINE_BYTES, array, call_kernel, call_usleep, count_of, count_up, pause
from kernels.cpu.team import Job, Kernel, job_dtype, sleep_function

if TYPE_CHECKING:
    from numpy.typing import NDArray

# presence: for each entry how many threads have come in and how many have gone out, on a cache line of its own.
# sleep: a C function `int(unsigned)` of microseconds, or null.
_PROGRAM = job_dtype("entries num_entries presence sleep")

# Waiting for the others takes microseconds, unless one of them has lost its processor to another process. Then the best
# thing to do with ours is to let go of it: the system moves the other one here.
_SPINS = 2000
_NAP_US = 20


@cache
def program_kernel() -> Kernel:
    """Runs the entries of a program, each when the one before it is over."""
    sources = SOURCES

    def program(address: int) -> None:
        _ = sources
        job = array(address, 1, _PROGRAM)[0]
        entries = array(job.entries, job.num_entries * 2, np.int64)
        for i in range(job.num_entries):
            entered = job.presence + i * LINE_BYTES
            left = entered + 8
            count_up(entered)
            call_kernel(entries[2 * i], entries[2 * i + 1])
            count_up(left)
            spins = 0
            while count_of(left) < count_of(entered):
                pause()
                spins += 1
                if spins > _SPINS and job.sleep != 0:
                    call_usleep(job.sleep, _NAP_US)

    return Kernel(compiled(program))


class Program:
    """Build it with `add`, then `seal` it once; then `set` and `run`, step after step. One thread at a time."""

    def __init__(self) -> None:
        self._added: list[tuple[Kernel, tuple[np.dtype[np.void], str], dict[str, float]]] = []
        self._records: dict[tuple[np.dtype[np.void], str], NDArray[np.void]] = {}
        self._columns: dict[tuple[str, str], list[NDArray[Any]]] = {}
        self._entries = np.empty((0, 2), np.int64)
        self._presence = np.empty(0, np.int64)
        self._job = Job(_PROGRAM)

    def add(self, kernel: Kernel, dtype: np.dtype[np.void], part: str, **fields: float) -> None:
        """Appends a job: `fields` of a record of `dtype`; the others are set later, for all jobs of one part at once.

        Fields that hold addresses do not keep their memory alive: the caller does.
        """
        self._added.append((kernel, (dtype, part), fields))

    def seal(self) -> None:
        """Lays out the records, each on cache lines of its own."""
        entries = []
        for key in dict.fromkeys(key for _, key, _ in self._added):
            self._records[key] = _lined_up(key[0], sum(own == key for _, own, _ in self._added))
        used = dict.fromkeys(self._records, 0)
        for kernel, key, fields in self._added:
            records, index = self._records[key], used[key]
            used[key] += 1
            for name, value in fields.items():
                records[name][index] = value
            entries.append((kernel.address, records.ctypes.data + index * records.itemsize))
        for (_, part), records in self._records.items():
            for name in records.dtype.names or ():
                self._columns.setdefault((part, name), []).append(records[name])
        self._entries = np.array(entries, np.int64)
        self._presence = _aligned(len(entries) * LINE_BYTES).view(np.int64)

    def set(self, part: str, **fields: float) -> None:
        """Writes these fields in every job of the part that has them."""
        for name, value in fields.items():
            for column in self._columns[part, name]:
                column[:] = value

    def run(self) -> None:
        """Works off all jobs on `torch.get_num_threads()` threads. Lets go of Python's lock."""
        for records in self._records.values():
            records["ticket"] = 0
        self._presence[:] = 0
        job = self._job.fill(
            entries=self._entries.ctypes.data,
            num_entries=len(self._entries),
            presence=self._presence.ctypes.data,
            sleep=sleep_function(),
        )
        program_kernel().run_in_team(job)


def _lined_up(dtype: np.dtype[np.void], count: int) -> NDArray[np.void]:
    """`count` records of zeros that begin at cache lines."""
    item_bytes = -(-dtype.itemsize // LINE_BYTES) * LINE_BYTES
    spaced = np.dtype(
        {
            "names": list(dtype.names or ()),
            "formats": [field[0] for field in (dtype.fields or {}).values()],
            "offsets": [field[1] for field in (dtype.fields or {}).values()],
            "itemsize": item_bytes,
        }
    )
    return _aligned(count * item_bytes).view(spaced)


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that begin at a cache line."""
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes]
