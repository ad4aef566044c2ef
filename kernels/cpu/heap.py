"""A heap of int64 numbers, the greatest on top; and one such number for a logit and its id.

key   ordered bits of the float32 │ not id          greater for greater logits, and for lower ids among equals
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
    """An int32 that orders as the float32 with these bits does; but -0 is less than 0."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _SIGN))


@inlined
def key_of(bits: Any, index: int) -> Any:
    """See above."""
    return (np.int64(ordered(bits)) << 32) | (MAX_ID - index)


@inlined
def id_of(key: Any) -> Any:
    return MAX_ID - (key & MAX_ID)


@inlined
def heapify(heap: Any, count: int) -> None:
    """Makes a heap of the first `count` numbers."""
    for top in range(count // 2 - 1, -1, -1):
        sink(heap, top, count)


@inlined
def drop(heap: Any, count: int) -> None:
    """Takes the top off a heap of so many."""
    heap[0] = heap[count - 1]
    sink(heap, 0, count - 1)


@inlined
def sink(heap: Any, top: int, count: int) -> None:
    """Lets heap[top] sink to where nothing below it is greater."""
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
