"""Bounds the levels of values that were read from JSON."""

from itertools import chain
from typing import Any

MAX_JSON_DEPTH = 100
"""Most levels of lists and objects within each other. Python's own bound depends on the stack of the caller, so a value
that was read there may be too deep to be written elsewhere."""

_HOLDERS = (dict, list)


def is_deep(value: object) -> bool:
    """Returns whether a value has more than MAX_JSON_DEPTH levels."""
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        holders = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, _HOLDERS)]
        if not holders:
            return False
        level = list(chain.from_iterable(holders))
    return True
