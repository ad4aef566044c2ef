"""Checks values that an answer is to contain as JSON."""

import json

from quire.json_depth import is_deep


def is_writable(value: object) -> bool:
    """Returns whether an answer can contain a value: it is not deep, its numbers are finite and its text is Unicode."""
    if is_deep(value):
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
