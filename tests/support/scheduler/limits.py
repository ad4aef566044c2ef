"""Checks that reaching a bound is counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.telemetry.limits import NUM_LIMITED


@contextmanager
def counted(limit: str, number: int = 1) -> Iterator[None]:
    """Checks that the bound is reached `number` times during the block."""
    before = NUM_LIMITED[limit]
    yield
    assert NUM_LIMITED[limit] - before == number
