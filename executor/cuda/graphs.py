"""Decode-only steps as CUDA graphs: one launch for a whole step, in buckets of batch size.

A graph is captured when a step first needs it, or earlier while the device is idle. Their number is bounded: there is
at most one of each kind for each bucket.
"""

from bisect import bisect_left
from collections.abc import Callable
from enum import Enum

from executor.cuda.accelerator import Accelerator, Body


class StepKind(Enum):
    """The two kinds of graphs: the model alone, or a whole step whose rows are all greedy."""

    FORWARD = "forward"
    GREEDY = "greedy"


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the sizes of graphs, ascending up to max_num_seqs: little padding at any size, and few graphs."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class Graphs:
    """Captured work by kind and bucket. `make` returns the work of a kind on a number of rows."""

    def __init__(self, accelerator: Accelerator, max_num_seqs: int, make: Callable[[StepKind, int], Body]) -> None:
        self.buckets = bucket_sizes(max_num_seqs)
        self._accelerator = accelerator
        self._make = make
        self._captured: dict[tuple[StepKind, int], Body] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def bucket(self, num_rows: int) -> int:
        """Returns the smallest bucket that holds num_rows, which is at most max_num_seqs."""
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def needs_capture(self, kind: StepKind, bucket: int) -> bool:
        return (kind, bucket) not in self._captured

    def capture(self, kind: StepKind, bucket: int) -> None:
        """Captures the work, and runs it once before that: see `Accelerator.capture`."""
        self._captured[kind, bucket] = self._accelerator.capture(self._make(kind, bucket))

    def run(self, kind: StepKind, bucket: int) -> None:
        """Launches work that was captured."""
        self._captured[kind, bucket]()
