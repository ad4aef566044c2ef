"""Decode steps as CUDA graphs: one launch for all of a step, in buckets of batch size.

A graph is captured when a step first needs it, or before, while there is nothing else to do. How many there can be is
known beforehand: one of each kind a bucket.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable

from executor.cuda.accelerator import Accelerator, Body


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Ascending, the last is max_num_seqs: few rows of padding at any size, and few graphs to capture."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class Graphs:
    """Captured work by kind and bucket. `make` builds the work of a kind on so many rows."""

    def __init__(self, accelerator: Accelerator, max_num_seqs: int, make: Callable[[Hashable, int], Body]) -> None:
        self.buckets = bucket_sizes(max_num_seqs)
        self._accelerator = accelerator
        self._make = make
        self._captured: dict[tuple[Hashable, int], Body] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def bucket(self, num_rows: int) -> int:
        """The smallest that holds so many rows; num_rows is at most max_num_seqs."""
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def needs_capture(self, kind: Hashable, bucket: int) -> bool:
        return (kind, bucket) not in self._captured

    def capture(self, kind: Hashable, bucket: int) -> None:
        """The work is launched once before: see `Accelerator.capture`."""
        self._captured[kind, bucket] = self._accelerator.capture(self._make(kind, bucket))

    def run(self, kind: Hashable, bucket: int) -> None:
        """Launches work that was captured."""
        self._captured[kind, bucket]()
