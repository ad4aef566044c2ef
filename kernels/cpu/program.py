"""A whole step as a list of jobs that a team of threads executes without returning to Python.

Every thread goes through the jobs in order and takes units that are left. A job is finished when all its units have
been taken and every thread that entered it has left it; a thread that has not entered yet is not waited for::

    thread 0  ─norm─┃──── linear ────┃─ rotate, store ─┃── attention ──┃─ … ─┃
    thread 1  ──────┃──── linear ────┃ · · · preempted · · · ── attention ┃─ … ─┃

The list is made once, over buffers with fixed addresses. Between two runs the caller changes only what differs from
step to step: the numbers of rows, and the addresses of the step's own inputs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.cpu.compiler import compiled
from kernels.cpu.native import LINE_BYTES, array, call_kernel, call_usleep, count_of, count_up, pause
from kernels.cpu.team import Job, Kernel, job_dtype, sleep_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# presence: for each entry, the number of threads that have entered and the number that have left, on its own cache
# line. sleep: a C function `int(unsigned)` of microseconds, or null.
_PROGRAM = job_dtype("entries num_entries presence sleep")

# Waiting for the other threads takes microseconds, unless one of them was preempted by another process. Sleeping frees
# this thread's core, so that the system can move the preempted thread to it.
_SPINS = 2000
_NAP_US = 20


@cache
def program_kernel() -> Kernel:
    """Returns the kernel that runs the entries of a program, each after the previous one has finished."""

    def program(address: int) -> None:
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
    """A list of jobs: call `add` for each and `seal` once, then `set` and `run` for every step.

    Only one thread may use a program at a time.
    """

    def __init__(self) -> None:
        self._added: list[tuple[Kernel, tuple[np.dtype[np.void], str], dict[str, float]]] = []
        self._records: dict[tuple[np.dtype[np.void], str], NDArray[np.void]] = {}
        self._columns: dict[tuple[str, str], list[NDArray[Any]]] = {}
        self._entries = np.empty((0, 2), np.int64)
        self._presence = np.empty(0, np.int64)
        self._pauses: list[tuple[int, Callable[[], None]]] = []
        self._job = Job(_PROGRAM)

    def add(self, kernel: Kernel, dtype: np.dtype[np.void], part: str, **fields: float) -> None:
        """Appends a job with these fields of a record of `dtype`; `set` writes the others, for all jobs of one part.

        The caller keeps the memory alive that the fields point to.
        """
        self._added.append((kernel, (dtype, part), fields))

    def pause(self, action: Callable[[], None]) -> None:
        """Appends an action of the calling thread, between the jobs that were added before and those added later."""
        self._pauses.append((len(self._added), action))

    def seal(self) -> None:
        """Lays out the records, each on its own cache lines."""
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
        names = {name for dtype, _ in self._records for name in dtype.names or ()}
        self._columns = {(part, name): [] for _, part in self._records for name in names}
        for (_, part), records in self._records.items():
            for name in records.dtype.names or ():
                self._columns[part, name].append(records[name])
        self._entries = np.array(entries, np.int64)
        self._presence = _aligned(len(entries) * LINE_BYTES).view(np.int64)

    def set(self, part: str, **fields: float) -> None:
        """Writes these fields in every job of the part that has them."""
        for name, value in fields.items():
            for column in self._columns[part, name]:
                column[:] = value

    def run(self) -> None:
        """Runs all jobs on `torch.get_num_threads()` threads. Releases Python's global interpreter lock."""
        for records in self._records.values():
            records["ticket"] = 0
        self._presence[:] = 0
        first = 0
        for stop, action in self._pauses:
            self._run(first, stop)
            action()
            first = stop
        self._run(first, len(self._entries))

    def _run(self, first: int, stop: int) -> None:
        """Runs the jobs from first to stop, without stop."""
        if first == stop:
            return
        job = self._job.fill(
            entries=self._entries.ctypes.data + first * self._entries.strides[0],
            num_entries=stop - first,
            presence=self._presence.ctypes.data + first * LINE_BYTES,
            sleep=sleep_function(),
        )
        program_kernel().run_in_team(job)


def _lined_up(dtype: np.dtype[np.void], count: int) -> NDArray[np.void]:
    """Returns `count` records of zeros, each of which begins at a cache line."""
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
    """Returns zeros that begin at a cache line."""
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes]
