"""Reads input files up to a bound, because a device or a pipe may never end."""

from pathlib import Path

from planning.errors import PlanningError


def read_text(path: Path, max_bytes: int) -> str:
    """Returns the text of a file. Raises OSError, UnicodeDecodeError, and PlanningError if it has more bytes."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise PlanningError(f"{path}: longer than {max_bytes:,} bytes")
    return content.decode("utf-8")
