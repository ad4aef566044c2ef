"""A token for each row of logits: one pass a row to weigh the vocabulary, and an order only of what has to have one.

A draw among the likeliest tokens needs to know where top-k, top-p and min-p cut, and which token a share of the mass
that is left falls on: places in the order of all tokens by logit. A row is not sorted for that. Its tokens are counted,
and their weights added up, in buckets of equal distance from the greatest logit::

    bucket      0    1    2        3    …                  NUM_BUCKETS - 1
    tokens      ▏    ▎    ▌        ▊                       ████████████████
    weights     █    ▆    ▅        ▃                       ▏
                               └─ the place lies in here: these tokens go on a heap, and leave it in their order

Whole buckets are passed by their sums; only the one in which something is cut, or drawn, is put in order, as far as is
needed. So a row costs much the same whether top-k is 5 or 5,000. Tokens beyond all buckets weigh nothing that shows in
a sum: they are passed over.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.cpu.compiler import SOURCES, compiled, inlined
from kernels.cpu.heap import drop, heapify, id_of, key_of, ordered
from kernels.cpu.native import LINE_BYTES, array, count_up, exp2, read, storage_of
from kernels.cpu.team import Job, Kernel, job_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# rows: int64, which rows of logits; temperatures and the following: one a row of logits; token_ids: one of `rows`.
# seats: how many threads have come in; each has seat_bytes of scratch for itself: its logits as float32, and at these
# offsets what is worked out of them.
SAMPLE_JOB = job_dtype(
    """logits row_bytes vocab_size rows num_rows temperatures top_ks top_ps min_ps uniforms token_ids
    seats scratch seat_bytes weights places heap masses counts"""
)

NUM_BUCKETS = 1024
_LAST = NUM_BUCKETS - 1
# Distances, in temperatures, that have buckets of their own. Beyond, a token weighs less than 2e-14 of the likeliest.
_MAX_DISTANCE = 32.0
# One thread does so many logits in some ten microseconds.
_MIN_TEAM_NUMBERS = 16384
_BLOCK = 256
_ORDERED_MINUS_INF = np.int32(-0x7F800001)
_MINUS_LOG2_E = np.float32(-math.log2(math.e))

_job = Job(SAMPLE_JOB)


@cache
def sample_kernel(storage: int) -> Kernel:
    """Rows are units."""
    sources = SOURCES

    def sample(address: int) -> None:
        _ = sources
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


# --- a row: what it holds ---------------------------------------------------------------------------------------------


@inlined
def _likeliest(bits: Any) -> int:
    """The lowest index of the greatest logit."""
    greatest = np.int32(-(2**31))
    for i in range(len(bits)):
        greatest = max(greatest, ordered(bits[i]))
    for i in range(len(bits)):
        if ordered(bits[i]) == greatest:
            return i
    return 0


@inlined
def _least(bits: Any, values: Any) -> Any:
    """The least logit above -inf, or the first one if there is none."""
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
    """exp((logit - peak) / temperature): 1 for the likeliest token, and never an overflow."""
    for i in range(len(values)):
        weights[i] = exp2((peak - values[i]) / temperature * _MINUS_LOG2_E)


@inlined
def _place(values: Any, peak: Any, least: Any, temperature: Any, places: Any) -> Any:
    """Each token's bucket. All steps keep the order of the logits, equal ones included.

    Returns buckets a distance, and how many buckets have weight: the last one has none if it holds all beyond.
    """
    distance = (peak - least) / temperature
    width = min(distance, np.float32(_MAX_DISTANCE))
    scale = np.float32(0)
    if width > 0:
        scale = min(np.float32(NUM_BUCKETS) / width, np.float32(1e30))
    for i in range(len(values)):
        at = (peak - values[i]) / temperature * scale
        places[i] = np.int32(at if at < np.float32(_LAST) else np.float32(_LAST))  # NaN is in the last one
    return scale, NUM_BUCKETS if distance <= _MAX_DISTANCE else _LAST


@inlined
def _count(places: Any, weights: Any, masses: Any, counts: Any) -> None:
    """Weights and tokens of each bucket."""
    for place in range(NUM_BUCKETS):
        masses[place] = 0.0
        counts[place] = 0
    for i in range(len(places)):
        place = places[i]
        masses[place] += weights[i]
        counts[place] += 1


# --- a row: what is drawn ---------------------------------------------------------------------------------------------


@inlined
def _draw(weights: Any, min_p: Any, uniform: Any, likeliest: int) -> int:
    """Among all tokens of min_p and more: the first whose cumulative weight, by id, exceeds the uniform's share."""
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
    """Among the likeliest: top-k of all, of these the fewest that reach top-p, of these those of min_p and more."""
    masses = buckets[4]
    most = len(buckets[0]) if top_k <= 0 else min(top_k, len(buckets[0]))
    zero, nothing = np.float32(0), np.float32(np.inf)
    mass = masses.sum() if top_k <= 0 else _walk(buckets, num_buckets, most, nothing, zero, num_buckets, nothing)[0]
    limit = np.float32(mass) * top_p if top_p < 1 else nothing
    # Buckets of tokens that are all likely enough, whatever rounding has done at their borders.
    num_likely = int(min(-np.log(min_p) * scale, np.float32(num_buckets))) - 1 if min_p > 0 else num_buckets
    kept, num_kept, _ = _walk(buckets, num_buckets, most, limit, min_p, num_likely, nothing)
    return _walk(buckets, num_buckets, num_kept, nothing, zero, num_buckets, uniform * np.float32(kept))[2]


@inlined
def _walk(buckets: Any, num_buckets: int, most: int, limit: Any, min_p: Any, num_likely: int, target: Any) -> Any:
    """Passes tokens in the order of likelihood, one at least, while they are fewer than `most`, what was passed weighs
    less than `limit`, and the next one at least min_p (all of the first num_likely buckets do); but not beyond the
    token with which it exceeds `target`.

    Returns the weight and the number of those that were passed, and the last one, if there is a target.
    """
    bits, weights, places, heap, masses, counts = buckets
    passed, num_passed, last = 0.0, 0, 0
    for place in range(num_buckets):
        count = counts[place]
        if count == 0:
            continue
        after = np.float32(passed + masses[place])
        # With a target, the last token is asked for: its bucket is gone through.
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
    """The tokens of a bucket as a heap, the likeliest one on top, lower ids first among equals."""
    found = 0
    for i in range(len(places)):
        if places[i] == place:
            heap[found] = key_of(bits[i], i)
            found += 1
    heapify(heap, count)


@inlined(reorder=True)
def _sum(numbers: Any) -> Any:
    total = np.float32(0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


# --- rows -------------------------------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """Memory for the threads of a team, which stays; each caller has its own."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)
        self._seats = np.zeros(1, np.int64)

    def fields(self, vocab_size: int) -> dict[str, int]:
        """What a SAMPLE_JOB says of it."""
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
    """Token ids[len(rows)], one for each of these rows of logits[S, V], which has one contiguous row after the other.

    The other arrays are [S]: temperature 0 takes the likeliest token, the lowest id among equals. top_k 0, top_p 1 and
    min_p 0 cut nothing; a uniform, in [0, 1), decides. What cuts mean is said in `executor.sampling.sampler`.
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
