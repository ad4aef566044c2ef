"""A max-heap of int64 numbers, and the number that stands for a logit and its token id.

key   ordered bits of the float32 │ not id          greater for greater logits, and for lower ids of equal logits
      32 bits                     │ 32 bits
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compiler import inlined

MAX_ID = (1 << 32) - 1
MINUS_ZERO = np.int32(-(2**31))
"""The bits of -0."""
_SIGN = np.int32(0x7FFFFFFF)


@inlined
def ordered(bits: Any) -> Any:
    """Returns an int32 that has the same order as the float32 with these bits, except that -0 is less than 0."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _SIGN))


@inlined
def key_of(bits: Any, index: int) -> Any:
    """Returns the key of a logit, given by its bits, and a token id."""
    return (np.int64(ordered(bits)) << 32) | (MAX_ID - index)


@inlined
def id_of(key: Any) -> Any:
    """Returns the token id of a key."""
    return MAX_ID - (key & MAX_ID)


@inlined
def heapify(heap: Any, count: int) -> None:
    """Turns the first `count` numbers into a heap."""
    for top in range(count // 2 - 1, -1, -1):
        sink(heap, top, count)


@inlined
def drop(heap: Any, count: int) -> None:
    """Removes the greatest number from a heap of `count` numbers."""
    heap[0] = heap[count - 1]
    sink(heap, 0, count - 1)


@inlined
def sink(heap: Any, top: int, count: int) -> None:
    """Moves heap[top] down until no number below it is greater."""
    value = heap[top]
    at = top
    while True:
        below = 2 * at + 1
        if below >= count:
            break
        if below + 1 < count and heap[below + 1] > heap[below]:
            below += 1
        if heap[below] <= value:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = value
