"""Decode-only steps as CUDA graphs: one launch for a whole step, in buckets of batch size.

All graphs are captured before the first plan: one of each kind for each bucket. Work that has no graph, because the
device had no memory for it or before `capture`, is launched kernel by kernel instead.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from enum import Enum

from executor.cuda.accelerator import Accelerator, Body
from executor.cuda.retry import with_room
from executor.device.device_memory import is_out_of_memory
from kernels import Progress

_log = logging.getLogger(__name__)


class StepKind(Enum):
    """The two kinds of graphs: the model alone, or a whole step whose rows are all greedy."""

    FORWARD = "forward"
    GREEDY = "greedy"


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the sizes of graphs, ascending up to max_num_seqs: little padding at any size, and few graphs."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class Graphs:
    """Work by kind and bucket, captured or not. `make` returns the work of a kind on a number of rows."""

    def __init__(self, accelerator: Accelerator, max_num_seqs: int, make: Callable[[StepKind, int], Body]) -> None:
        self.buckets = bucket_sizes(max_num_seqs)
        self._accelerator = accelerator
        # The largest comes first, because the others can reuse its memory.
        self._bodies = {(kind, size): make(kind, size) for size in reversed(self.buckets) for kind in StepKind}
        self._captured: dict[tuple[StepKind, int], Body] = {}

    def __len__(self) -> int:
        """Returns the number of graphs that have been captured."""
        return len(self._captured)

    @property
    def num_missing(self) -> int:
        return len(self._bodies) - len(self._captured)

    def bucket(self, num_rows: int) -> int:
        """Returns the smallest bucket that holds num_rows, which is at most max_num_seqs."""
        return self.buckets[bisect_left(self.buckets, num_rows)]

    def capture(self, progress: Progress) -> None:
        """Captures everything, and runs everything once before that: see `Accelerator.capture`."""
        memory = self._accelerator.graph_memory()
        for done, ((kind, bucket), body) in enumerate(self._bodies.items()):
            progress(f"{bucket} sequences, {kind.value}", done, len(self._bodies))
            try:
                self._captured[kind, bucket] = self._accelerator.capture(body, memory)
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                _log.warning(
                    "no memory for the graph of %d sequences (%s), whose steps are launched kernel by kernel: %s",
                    *(bucket, kind.value, str(error).splitlines()[0]),
                )
            # The error is gone here, and with it what its traceback keeps alive: the graph and its temporaries.
            self._accelerator.release()

    def run(self, kind: StepKind, bucket: int) -> None:
        """Launches the work. A graph that the device has no memory to launch has done nothing, and runs as its body.

        All of a body can be repeated except its last launch, `close_rows` in a greedy step, which allocates nothing.
        """
        body = self._bodies[kind, bucket]
        with_room(self._accelerator, self._captured.get((kind, bucket), body), body)
