"""Checks values that an answer, or the prompt of a chat, is to contain as JSON."""

import json
from typing import Any

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


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call. Text that is no JSON object, as of a call that broke off, becomes a field."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) and is_writable(found) else {"invalid_json": text}
