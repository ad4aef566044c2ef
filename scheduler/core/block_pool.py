"""The pool of physical blocks: integers, reference counts, and a free queue that is also the LRU."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import not_

from scheduler.core.errors import InvariantViolation

NULL_BLOCK = 0
"""Never allocated. The executor writes padding and overrun rows there."""


class BlockPool:
    """Blocks `1 … num_blocks - 1`, each free (ref_count 0) or referenced.

    The free queue is ordered by reuse: its front is handed out first. A freed block whose contents can still be
    found (it is in the prefix index) goes to the back, so the queue is an LRU over cached blocks; a block that
    nobody could find again goes to the front, so that it is reused before anything useful is overwritten.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._missing_run = num_blocks  # no run is as long as this: known until a block is released

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks with ref_count 0, the cached ones among them included."""
        return len(self._free)

    def free_blocks(self) -> Iterable[int]:
        """Free blocks in the order in which they will be reused."""
        return self._free.keys()

    def take(self) -> int:
        """Hands out the next free block, with ref_count 1. The caller has checked that there is one."""
        if not self._free:
            raise InvariantViolation("a block was taken from an empty pool")
        block, _ = self._free.popitem(last=False)
        self.ref_counts[block] = 1
        return block

    def find_run(self, length: int) -> int | None:
        """First-fit: where the first run of so many consecutive free blocks begins; None: no run is that long."""
        if not length:
            return 1
        if length >= self._missing_run:
            return None
        first = self._free_map().find(b"\x01" * length, 1)
        if first < 0:
            self._missing_run = length
            return None
        return first

    def take_run(self, length: int) -> list[int]:
        """Hands out the first run of so many blocks, with ref_count 1. The caller has checked that there is one."""
        first = self.find_run(length)
        if first is None:
            raise InvariantViolation(f"a run of {length} blocks was taken, and there is none")
        run = list(range(first, first + length))
        for block in run:
            self.retain(block)
        return run

    def free_runs(self) -> Iterator[int]:
        """Lengths of the longest runs of consecutive free blocks, from the first to the last."""
        return (len(run.group()) for run in re.finditer(b"\x01+", self._free_map()[1:]))

    def _free_map(self) -> bytes:
        """A byte for each block, the null block too: 1 where ref_count is 0."""
        return bytes(map(not_, self.ref_counts))

    def retain(self, block: int) -> None:
        """One more reference to a block; a free one leaves the free queue."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int, *, findable: bool) -> None:
        """One reference less; the last one returns the block to the free queue: `findable` ones live longest."""
        if self.ref_counts[block] <= 0:
            raise InvariantViolation(f"block {block} was released more often than it was referenced")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._missing_run = self.num_blocks
            self._free[block] = None
            if not findable:
                self._free.move_to_end(block, last=False)
