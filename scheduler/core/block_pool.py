"""The pool of physical blocks: a reference count for each block id, and a free queue in LRU order."""

from collections import OrderedDict
from collections.abc import Iterable

from scheduler.core.errors import InvariantViolation


class BlockPool:
    """Blocks `1 … num_blocks - 1`, each free (ref_count 0) or referenced.

    Block 0, the null block, is never allocated. The executor writes padding and overrun rows to it.

    The free queue is ordered by reuse: its front is handed out first. A freed block that is in the prefix index goes to
    the back, so the queue is an LRU over cached blocks. Any other block goes to the front, so that it is reused before
    a cached one is overwritten.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks with ref_count 0, cached ones included."""
        return len(self._free)

    def free_blocks(self) -> Iterable[int]:
        """Returns the free blocks in the order in which they will be reused."""
        return self._free.keys()

    def keep_longest(self, block: int) -> None:
        """Moves a free block to the end of the free queue."""
        self._free.move_to_end(block)

    def take(self) -> int:
        """Hands out the next free block, with ref_count 1. The caller has checked that there is one."""
        if not self._free:
            raise InvariantViolation("a block was taken from an empty pool")
        block, _ = self._free.popitem(last=False)
        self.ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a block; a free block leaves the free queue."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int, *, findable: bool) -> None:
        """Drops a reference. The last one returns the block to the free queue, where `findable` blocks stay longest."""
        if self.ref_counts[block] <= 0:
            raise InvariantViolation(f"block {block} was released more often than it was referenced")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free[block] = None
            if not findable:
                self._free.move_to_end(block, last=False)
