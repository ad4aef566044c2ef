"""The steps of a check: each is timed, and the first problem ends the check."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class CheckFailed(Exception):
    """The product does not do what its documentation promises."""


def expect(condition: bool, problem: str) -> None:
    """Raises CheckFailed with the problem unless the condition holds."""
    if not condition:
        raise CheckFailed(problem)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Prints the step when it begins, and its duration when it has ended."""
    print(step, flush=True)
    start_s = time.monotonic()
    yield
    print(f"{step}: {time.monotonic() - start_s:.1f} s", flush=True)
