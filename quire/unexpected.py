"""Counts exceptions that no code expected and that the service survived. Each is also logged, with its traceback."""

from collections import Counter

NUM_UNEXPECTED: Counter[str] = Counter()
"""One process has one service, and a sink or a thread knows no other object of it."""


def unexpected(where: str) -> None:
    """Counts an exception by the part of the service that caught it."""
    NUM_UNEXPECTED[where] += 1
