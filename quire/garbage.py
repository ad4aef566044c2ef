"""Makes the full collections of cyclic garbage rare: the event loop stands still during each."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_YOUNG_COLLECTIONS = 500
"""Full collections come after so many of the middle generation, about 3.5 million new objects (CPython's default: 10).

Each visits all objects of the open requests: 0.2 s with 2,000 of them, every 10 s under load with the default. What is
freed by reference counts does not wait for a collection; garbage in cycles, of which gRPC leaves about 1 KB for each
call, does.
"""


def collect_rarely() -> None:
    """Called when everything that stays exists: no later collection visits it."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NUM_YOUNG_COLLECTIONS)


@contextmanager
def without_collections() -> Iterator[None]:
    """Imports torch in a sixth less time: what it makes stays, and each full collection would visit all of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def drop_frames(error: BaseException | None) -> None:
    """Drops the frames in which an error was raised and handled.

    A frame with a variable for the error is part of a cycle with it, which keeps everything that the frame's other
    variables hold until the next full collection: a refused request of 4 MiB, for example.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__context__
