"""The messages between a worker process and its parent, as the worker reads and writes them.

Standard input carries messages: a length of 4 bytes, big-endian, then JSON. Standard output carries a letter for each
answer, then a length of 4 bytes and UTF-8. It is not JSON, because the parent would parse that on its event loop.
`scheduler.text.workers` is the parent's end. This module imports the standard library only.
"""

import json
import sys
from typing import Any


def read_message() -> dict[str, Any] | None:
    """Returns the next message, or None if the parent has closed the pipe."""
    header = sys.stdin.buffer.read(4)
    if len(header) < 4:
        return None
    body = sys.stdin.buffer.read(int.from_bytes(header))
    message: dict[str, Any] = json.loads(body)
    return message


def write_answer(kind: bytes, text: str) -> None:
    body = text.encode(errors="replace")
    sys.stdout.buffer.write(kind + len(body).to_bytes(4) + body)
    sys.stdout.buffer.flush()
