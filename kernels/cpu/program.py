"""A whole step as a list of jobs, which a team of threads works off without coming back to Python.

Every thread runs every job, in order; a job shares its work out by its ticket, and nobody begins a job before all are
done with the last one::

    thread 0  ─norm─┃──── linear ────┃─ rotate, store ─┃── attention ──┃─ … ─┃
    thread 1  ──────┃──── linear ────┃─────────────────┃── attention ──┃─ … ─┃

The list is made once, over buffers that stay where they are. Between two runs a caller changes only what differs from
step to step: numbers of rows, and addresses of what came with the step.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.compiler import SOURCES, compiled
from kernels.cpu.native import array, call_int32, call_kernel, count_of, count_up, pause
from kernels.cpu.team import Job, Kernel, job_dtype, team_size_function, yield_function

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LINE_BYTES = 64

# The ticket counts arrivals: of each thread, after each job. yield_processor, team_size: C functions `int()`; team_size
# is null where the team is as large as num_threads says; yield_processor is null where there is none.
_PROGRAM = job_dtype("entries num_entries num_threads team_size yield_processor")

# Waiting for the others takes microseconds, unless one of them has lost its processor to another process: then it is
# better to offer this one.
_SPINS_BEFORE_YIELD = 2000


@cache
def program_kernel() -> Kernel:
    """Runs the entries of a program, with a barrier after each."""
    sources = SOURCES

    def program(address: int) -> None:
        _ = sources
        job = array(address, 1, _PROGRAM)[0]
        entries = array(job.entries, job.num_entries * 2, np.int64)
        num_threads = job.num_threads
        if job.team_size != 0:
            num_threads = call_int32(job.team_size)
        for i in range(job.num_entries):
            call_kernel(entries[2 * i], entries[2 * i + 1])
            if num_threads > 1:
                count_up(address)
                everybody, spins = (i + 1) * num_threads, 0
                while count_of(address) < everybody:
                    pause()
                    spins += 1
                    if spins > _SPINS_BEFORE_YIELD and job.yield_processor != 0:
                        call_int32(job.yield_processor)

    return Kernel(compiled(program))


class Program:
    """Build it with `add`, then `seal` it once; then `set` and `run`, step after step. One thread at a time."""

    def __init__(self) -> None:
        self._added: list[tuple[Kernel, tuple[np.dtype[np.void], str], dict[str, float]]] = []
        self._records: dict[tuple[np.dtype[np.void], str], NDArray[np.void]] = {}
        self._entries = np.empty((0, 2), np.int64)
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
        self._entries = np.array(entries, np.int64)

    def set(self, part: str, **fields: float) -> None:
        """Writes these fields in every job of the part that has them."""
        for (_, own_part), records in self._records.items():
            if own_part == part and records.dtype.names is not None:
                for name, value in fields.items():
                    if name in records.dtype.names:
                        records[name] = value

    def run(self) -> None:
        """Works off all jobs on `torch.get_num_threads()` threads. Lets go of Python's lock."""
        for records in self._records.values():
            records["ticket"] = 0
        program_kernel().run_in_team(
            self._job.fill(
                self._entries.ctypes.data,
                len(self._entries),
                torch.get_num_threads(),
                team_size_function(),
                yield_function(),
            )
        )


def _lined_up(dtype: np.dtype[np.void], count: int) -> NDArray[np.void]:
    """`count` records of zeros that begin at cache lines."""
    item_bytes = -(-dtype.itemsize // _LINE_BYTES) * _LINE_BYTES
    spaced = np.dtype(
        {
            "names": list(dtype.names or ()),
            "formats": [field[0] for field in (dtype.fields or {}).values()],
            "offsets": [field[1] for field in (dtype.fields or {}).values()],
            "itemsize": item_bytes,
        }
    )
    memory = np.zeros(count * item_bytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + count * item_bytes].view(spaced)
