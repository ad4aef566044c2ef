"""Samples a token from each row of logits: weighs the vocabulary in one pass and sorts only what has to be sorted.

A draw among the most likely tokens needs two things: where top-k, top-p and min-p cut the tokens in the order of their
logits, and which token a given share of the remaining mass falls on. Neither requires sorting the row. Instead, its
tokens are counted and their weights added up in buckets by their distance from the greatest logit::

    bucket      0    1    2        3    …                  NUM_BUCKETS - 1
    tokens      ▏    ▎    ▌        ▊                       ████████████████
    weights     █    ▆    ▅        ▃                       ▏
                               └─ the cut falls into this bucket: a heap yields its tokens in order

A whole bucket is skipped by its sums. Only the bucket in which a cut or the drawn token falls is put in order, as far
as needed. So a row costs about the same whether top-k is 5 or 5,000. Tokens beyond all buckets weigh too little to
change a sum and are skipped.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.cpu.compiler import compiled, inlined
from kernels.cpu.heap import drop, heapify, id_of, key_of, ordered
from kernels.cpu.native import LINE_BYTES, array, count_up, exp2, read, storage_of
from kernels.cpu.team import Job, Kernel, job_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# rows: int64, the rows of logits to sample; temperatures to uniforms: one per row of logits; token_ids: one per entry
# of `rows`. seats: counts the threads that have entered. Each thread has seat_bytes of scratch memory: first the logits
# of its row as float32, then, at the offsets weights to counts, the values computed from them.
SAMPLE_JOB = job_dtype(
    """logits row_bytes vocab_size rows num_rows temperatures top_ks top_ps min_ps uniforms token_ids
    seats scratch seat_bytes weights places heap masses counts"""
)

NUM_BUCKETS = 1024
_LAST = NUM_BUCKETS - 1
# Greatest distance, in temperatures, for which there are buckets. Beyond it a token weighs less than 2e-14 of the most
# likely one.
_MAX_DISTANCE = 32.0
# One thread handles this many logits in about ten microseconds.
_MIN_TEAM_NUMBERS = 16384
_BLOCK = 256
_ORDERED_MINUS_INF = np.int32(-0x7F800001)
_MINUS_LOG2_E = np.float32(-math.log2(math.e))

_job = Job(SAMPLE_JOB)


@cache
def sample_kernel(storage: int) -> Kernel:
    """Returns the kernel that samples a token from each row; a row is a unit."""

    def sample(address: int) -> None:
        job = array(address, 1, SAMPLE_JOB)[0]
        size = job.vocab_size
        seat = job.scratch + count_up(job.seats) * job.seat_bytes
        values, bits = array(seat, size, np.float32), array(seat, size, np.int32)
        weights = array(seat + job.weights, size, np.float32)
        places = array(seat + job.places, size, np.int32)
        heap = array(seat + job.heap, size, np.int64)
        masses = array(seat + job.masses, NUM_BUCKETS, np.float64)
        counts = array(seat + job.counts, NUM_BUCKETS, np.int64)
        while True:
            unit = count_up(address)
            if unit >= job.num_rows:
                return
            row = array(job.rows, job.num_rows, np.int64)[unit]
            logits = job.logits + row * job.row_bytes
            for i in range(size):
                values[i] = read(storage, logits, i) + np.float32(0)  # equal logits get equal bits: -0 becomes 0
            temperature = array(job.temperatures, row + 1, np.float32)[row]
            top_k = array(job.top_ks, row + 1, np.int32)[row]
            top_p = array(job.top_ps, row + 1, np.float32)[row]
            min_p = array(job.min_ps, row + 1, np.float32)[row]
            uniform = array(job.uniforms, row + 1, np.float32)[row]
            chosen = _likeliest(bits)
            if temperature > 0:
                if top_k > 0 or top_p < 1:
                    least = _least(bits, values)
                    _weigh(values, values[chosen], temperature, weights)
                    scale, num_buckets = _place(values, values[chosen], least, temperature, places)
                    _count(places, weights, masses, counts)
                    buckets = (bits, weights, places, heap, masses, counts)
                    chosen = _draw_likely(buckets, num_buckets, scale, top_k, top_p, min_p, uniform)
                else:
                    _weigh(values, values[chosen], temperature, weights)
                    chosen = _draw(weights, min_p, uniform, chosen)
            array(job.token_ids, job.num_rows, np.int32)[unit] = chosen

    return Kernel(compiled(sample))


# --- one row: its weights and buckets ---------------------------------------------------------------------------------


@inlined
def _likeliest(bits: Any) -> int:
    """Returns the lowest index of the greatest logit."""
    greatest = np.int32(-(2**31))
    for i in range(len(bits)):
        greatest = max(greatest, ordered(bits[i]))
    for i in range(len(bits)):
        if ordered(bits[i]) == greatest:
            return i
    return 0


@inlined
def _least(bits: Any, values: Any) -> Any:
    """Returns the least logit above -inf, or the first one if there is none."""
    least = np.int32(2**31 - 1)
    for i in range(len(bits)):
        rank = ordered(bits[i])
        least = min(least, rank if rank > _ORDERED_MINUS_INF else np.int32(2**31 - 1))
    for i in range(len(bits)):
        if ordered(bits[i]) == least:
            return values[i]
    return values[0]


@inlined
def _weigh(values: Any, peak: Any, temperature: Any, weights: Any) -> None:
    """Computes exp((logit - peak) / temperature), which is 1 for the most likely token and never overflows."""
    for i in range(len(values)):
        weights[i] = exp2((peak - values[i]) / temperature * _MINUS_LOG2_E)


@inlined
def _place(values: Any, peak: Any, least: Any, temperature: Any, places: Any) -> Any:
    """Computes the bucket of each token. Every operation keeps the order of the logits, and equal ones stay equal.

    Returns the number of buckets per unit of distance, and the number of buckets whose tokens have weight: the last
    bucket has none if it holds all tokens beyond _MAX_DISTANCE.
    """
    distance = (peak - least) / temperature
    width = min(distance, np.float32(_MAX_DISTANCE))
    scale = np.float32(0)
    if width > 0:
        scale = min(np.float32(NUM_BUCKETS) / width, np.float32(1e30))
    for i in range(len(values)):
        at = (peak - values[i]) / temperature * scale
        places[i] = np.int32(at if at < np.float32(_LAST) else np.float32(_LAST))  # NaN goes to the last one
    return scale, NUM_BUCKETS if distance <= _MAX_DISTANCE else _LAST


@inlined
def _count(places: Any, weights: Any, masses: Any, counts: Any) -> None:
    """Adds up the weights and counts the tokens of each bucket."""
    for place in range(NUM_BUCKETS):
        masses[place] = 0.0
        counts[place] = 0
    for i in range(len(places)):
        place = places[i]
        masses[place] += weights[i]
        counts[place] += 1


# --- one row: the draw ------------------------------------------------------------------------------------------------


@inlined
def _draw(weights: Any, min_p: Any, uniform: Any, likeliest: int) -> int:
    """Draws among all tokens that pass min_p: the first whose cumulative weight, by id, exceeds the uniform's share."""
    size = len(weights)
    if min_p > 0:
        for i in range(size):
            weights[i] = weights[i] if weights[i] >= min_p else np.float32(0)
    total = 0.0
    for start in range(0, size, _BLOCK):
        total += _sum(weights[start : start + _BLOCK])
    target = uniform * np.float32(total)
    passed = 0.0
    last = likeliest
    for start in range(0, size, _BLOCK):
        block = weights[start : start + _BLOCK]
        mass = _sum(block)
        if np.float32(passed + mass) <= target:
            passed += mass
            continue
        for i in range(len(block)):
            passed += block[i]
            if block[i] > 0:
                last = start + i
                if np.float32(passed) > target:
                    return last
    return last


@inlined
def _draw_likely(buckets: Any, num_buckets: int, scale: Any, top_k: int, top_p: Any, min_p: Any, uniform: Any) -> Any:
    """Draws among the likeliest tokens: top-k of all, then the fewest that reach top-p, then those that pass min_p."""
    masses = buckets[4]
    most = len(buckets[0]) if top_k <= 0 else min(top_k, len(buckets[0]))
    zero, nothing = np.float32(0), np.float32(np.inf)
    mass = masses.sum() if top_k <= 0 else _walk(buckets, num_buckets, most, nothing, zero, num_buckets, nothing)[0]
    limit = np.float32(mass) * top_p if top_p < 1 else nothing
    # In these buckets all tokens pass min_p, even with rounding errors at their borders.
    num_likely = int(min(-np.log(min_p) * scale, np.float32(num_buckets))) - 1 if min_p > 0 else num_buckets
    kept, num_kept, _ = _walk(buckets, num_buckets, most, limit, min_p, num_likely, nothing)
    return _walk(buckets, num_buckets, num_kept, nothing, zero, num_buckets, uniform * np.float32(kept))[2]


@inlined
def _walk(buckets: Any, num_buckets: int, most: int, limit: Any, min_p: Any, num_likely: int, target: Any) -> Any:
    """Passes tokens in the order of likelihood until a limit is reached; passes at least one.

    It stops after `most` tokens, when the passed tokens weigh `limit` or more, before a token that weighs less than
    min_p (no token of the first num_likely buckets does), or with the token whose weight makes the sum exceed `target`.

    Returns the weight and the number of the passed tokens and, if there is a target, the last one.
    """
    bits, weights, places, heap, masses, counts = buckets
    passed, num_passed, last = 0.0, 0, 0
    for place in range(num_buckets):
        count = counts[place]
        if count == 0:
            continue
        after = np.float32(passed + masses[place])
        # With a target the caller needs the last token, so its bucket is not skipped.
        fits = num_passed + count < most or (num_passed + count == most and target == np.inf)
        if fits and after < limit and after <= target and place < num_likely:
            passed += masses[place]
            num_passed += count
            continue
        if num_passed > 0 and (num_passed >= most or np.float32(passed) >= limit):
            break
        _pile(bits, places, place, heap, count)
        for left in range(count, 0, -1):
            index = id_of(heap[0])
            weight = weights[index]
            if num_passed > 0 and (num_passed >= most or np.float32(passed) >= limit or weight < min_p):
                return passed, num_passed, last
            passed += weight
            num_passed += 1
            last = index
            if np.float32(passed) > target:
                return passed, num_passed, last
            drop(heap, left)
    return passed, num_passed, last


@inlined
def _pile(bits: Any, places: Any, place: int, heap: Any, count: int) -> None:
    """Puts the tokens of a bucket on a heap: the most likely one on top, lower ids first among equally likely ones."""
    found = 0
    for i in range(len(places)):
        if places[i] == place:
            heap[found] = key_of(bits[i], i)
            found += 1
    heapify(heap, count)


@inlined(reorder=True)
def _sum(numbers: Any) -> Any:
    """Returns the sum of the numbers, in the order that the compiler chooses."""
    total = np.float32(0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


# --- all rows ---------------------------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """Scratch memory for the threads of a team; each calling thread keeps its own."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)
        self._seats = np.zeros(1, np.int64)

    def fields(self, vocab_size: int) -> dict[str, int]:
        """Returns the fields of a SAMPLE_JOB that describe the scratch memory."""
        column_bytes = -(-vocab_size * 4 // LINE_BYTES) * LINE_BYTES
        sizes = {
            "values": column_bytes,
            "weights": column_bytes,
            "places": column_bytes,
            "heap": 2 * column_bytes,
            "masses": NUM_BUCKETS * 8,
            "counts": NUM_BUCKETS * 8,
        }
        ends = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        seat_bytes = ends["counts"]
        num_bytes = seat_bytes * torch.get_num_threads()
        if len(self.memory) < num_bytes:
            self.memory = np.empty(num_bytes, np.uint8)
        self._seats[0] = 0
        offsets = {name: ends[name] - sizes[name] for name in sizes if name != "values"}
        memory = {"seats": self._seats.ctypes.data, "scratch": self.memory.ctypes.data, "seat_bytes": seat_bytes}
        return memory | offsets


_scratch = _Scratch()


def sample(
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    temperatures: NDArray[np.float32],
    top_ks: NDArray[np.int32],
    top_ps: NDArray[np.float32],
    min_ps: NDArray[np.float32],
    uniforms: NDArray[np.float32],
) -> NDArray[np.int32]:
    """Returns token ids[len(rows)], one for each of these rows of logits[S, V]; the rows of logits are contiguous.

    The other arrays are [S]. Temperature 0 takes the most likely token, the lowest id among equally likely ones.
    top_k 0, top_p 1 and min_p 0 keep all tokens; the uniform, in [0, 1), selects one. `executor.sampling.sampler`
    defines the cuts.
    """
    token_ids = np.empty(len(rows), np.int32)
    if not len(rows):
        return token_ids
    vocab_size = logits.shape[1]
    if logits.stride(1) != 1:
        raise ValueError("the last dimension of logits must be contiguous")
    if rows.min() < 0 or rows.max() >= len(logits):
        raise ValueError(f"rows {rows.min()} to {rows.max()} of {len(logits)}")
    columns = {
        "rows": (rows, np.int64),
        "temperatures": (temperatures, np.float32),
        "top_ks": (top_ks, np.int32),
        "top_ps": (top_ps, np.float32),
        "min_ps": (min_ps, np.float32),
        "uniforms": (uniforms, np.float32),
    }
    held = {name: np.ascontiguousarray(column, dtype) for name, (column, dtype) in columns.items()}
    if any(len(column) != len(logits) for name, column in held.items() if name != "rows"):
        raise ValueError(f"parameters of {len(logits)} rows are needed")
    job = _job.fill(
        logits=logits.data_ptr(),
        row_bytes=logits.stride(0) * logits.element_size(),
        vocab_size=vocab_size,
        num_rows=len(rows),
        token_ids=token_ids.ctypes.data,
        **{name: column.ctypes.data for name, column in held.items()},
        **_scratch.fields(vocab_size),
    )
    kernel = sample_kernel(storage_of(logits.dtype))
    if len(rows) == 1 or len(rows) * vocab_size < _MIN_TEAM_NUMBERS:
        kernel.run_brief(job)
    else:
        kernel.run_in_team(job)
    return token_ids
