"""The numbers behind log-probabilities: a row's largest logits, the sum of its exponentials, and the rank of a token.

A row is read twice: first to find its greatest logit, then to sum the exponentials and collect the largest logits. A
heap with the least of them on top holds the largest logits, so most tokens need only one comparison.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.compiler import compiled
from kernels.cpu.heap import MINUS_ZERO, drop, heapify, id_of, key_of, ordered, sink
from kernels.cpu.native import array, bits_of, count_up, exp2, read, storage_of
from kernels.cpu.team import Job, Kernel, job_dtype

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# token_ids: int32, one per row, or null; keys: int64, num_keys per row; log_sums: float64; ranks: int32.
RANK_JOB = job_dtype("logits row_bytes vocab_size num_rows token_ids num_keys keys log_sums ranks")

# One thread handles this many logits in about ten microseconds.
_MIN_TEAM_NUMBERS = 16384
_BLOCK = 256
_LOG2_E = np.float32(math.log2(math.e))

_job = Job(RANK_JOB)


@cache
def rank_kernel(storage: int) -> Kernel:
    """Returns the kernel that ranks the logits of rows; a row is a unit."""

    def rank(address: int) -> None:
        job = array(address, 1, RANK_JOB)[0]
        size, num_keys = job.vocab_size, job.num_keys
        while True:
            row = count_up(address)
            if row >= job.num_rows:
                return
            logits = job.logits + row * job.row_bytes
            keys = array(job.keys + row * num_keys * 8, num_keys, np.int64)
            greatest = np.int32(-(2**31))
            peak = np.float32(-np.inf)
            for i in range(size):
                greatest = max(greatest, ordered(bits_of(read(storage, logits, i))))
            for i in range(size):
                if ordered(bits_of(read(storage, logits, i))) == greatest:
                    peak = read(storage, logits, i)
                    break
            total = np.float64(0)
            for start in range(0, size, _BLOCK):
                block = np.float32(0)
                for i in range(start, min(start + _BLOCK, size)):
                    block += exp2((read(storage, logits, i) - peak) * _LOG2_E)
                total += block
            array(job.log_sums, job.num_rows, np.float64)[row] = np.float64(peak) + np.log(total)
            if job.token_ids != 0:
                own = array(job.token_ids, job.num_rows, np.int32)[row]
                logit = read(storage, logits, own)
                rank = 1
                for i in range(own):
                    rank += read(storage, logits, i) >= logit
                for i in range(own + 1, size):
                    rank += read(storage, logits, i) > logit
                array(job.ranks, job.num_rows, np.int32)[row] = rank
            if num_keys == 0:
                continue
            # Keys have the order of (logit, not id). The heap holds their complements, so that the least key is on top.
            least = np.float32(-np.inf)
            for i in range(size):
                logit = read(storage, logits, i)
                if i >= num_keys and not logit > least:
                    continue
                bits = bits_of(logit)
                key = key_of(np.int32(0) if bits == MINUS_ZERO else bits, i)  # equal logits get equal bits
                if i < num_keys:
                    keys[i] = ~key
                    if i + 1 < num_keys:
                        continue
                    heapify(keys, num_keys)
                else:
                    keys[0] = ~key
                    sink(keys, 0, num_keys)
                least = read(storage, logits, id_of(~keys[0]))
            for left in range(num_keys - 1, -1, -1):  # the least one goes to the end
                least_id = id_of(~keys[0])
                drop(keys, left + 1)
                keys[left] = least_id

    return Kernel(compiled(rank, reorder=True))


def rank(
    logits: torch.Tensor, token_ids: NDArray[np.int32] | None, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]:
    """Returns three arrays for the rows of logits[S, V], ordered by logit and, among equal logits, by lower id.

    ids[S, count]   the ids of the largest logits, largest first; count is at most V
    log_sums[S]     log of the sum of exponentials: a log-probability is a logit minus this
    ranks[S]        1 + the number of tokens before token_ids[S]; 0 without token_ids
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the last dimension of logits must be contiguous")
    if not 0 <= count <= vocab_size:
        raise ValueError(f"{count} of {vocab_size} logits")
    if token_ids is not None and len(token_ids) != num_rows:
        raise ValueError(f"{len(token_ids)} tokens of {num_rows} rows")
    ids = np.empty((num_rows, count), np.int64)
    log_sums, ranks = np.empty(num_rows, np.float64), np.zeros(num_rows, np.int32)
    own = None if token_ids is None else np.ascontiguousarray(token_ids, np.int32)
    job = _job.fill(
        logits=logits.data_ptr(),
        row_bytes=logits.stride(0) * logits.element_size(),
        vocab_size=vocab_size,
        num_rows=num_rows,
        token_ids=0 if own is None else own.ctypes.data,
        num_keys=count,
        keys=ids.ctypes.data,
        log_sums=log_sums.ctypes.data,
        ranks=ranks.ctypes.data,
    )
    kernel = rank_kernel(storage_of(logits.dtype))
    if num_rows == 1 or num_rows * vocab_size < _MIN_TEAM_NUMBERS:
        kernel.run_brief(job)
    else:
        kernel.run_in_team(job)
    return ids, log_sums, ranks
