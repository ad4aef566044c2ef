"""Reads JSON bodies, within bounds of size, time, memory and parsing time.

`json.loads` is one call that holds the event loop. Its cost depends on the number of values: a mebibyte of text takes
1 ms, a mebibyte of `{},` takes 20 ms. So values are counted first, by the marks between them.
"""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING

from scheduler.core import InvalidRequest, QueueFull

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 1 << 20
MAX_BODY_S = 10.0
"""Time in which a body has to arrive."""

FREE_BYTES = 1 << 16
"""The beginning of each body, which does not count towards MAX_HELD_BYTES. Ordinary requests are no larger, so large
bodies that never end cannot keep them out."""

MAX_HELD_BYTES = 32 << 20
"""Bytes of all bodies that are arriving at the same time, without the first FREE_BYTES of each."""

MAX_JSON_MARKS = 64_000
"""Most commas, colons and opening brackets of a body, those in strings included."""

_MARKS = (b",", b":", b"{", b"[")


class RequestBodies:
    """Reads the bodies of all requests of one server."""

    def __init__(self) -> None:
        self._num_held_bytes = 0

    async def read_json(self, request: web.Request) -> object:
        """Returns the parsed body. Raises InvalidRequest if it is not JSON, too large or too slow; QueueFull if other
        bodies fill the memory that is set aside."""
        if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
            raise _too_large()
        data, num_held = bytearray(), 0
        try:
            async with asyncio.timeout(MAX_BODY_S):
                async for chunk in request.content.iter_any():
                    if len(data) + len(chunk) > MAX_BODY_BYTES:
                        raise _too_large()
                    data += chunk
                    num_more = max(0, len(data) - FREE_BYTES) - num_held
                    self._hold(num_more)
                    num_held += num_more
            parsed = parse_json(bytes(data))
            await asyncio.sleep(0)  # the loop runs between parsing and the checks, each of which takes milliseconds
            return parsed
        except TimeoutError:
            raise InvalidRequest({"": f"must arrive within {MAX_BODY_S:g} s"}) from None
        finally:
            self._num_held_bytes -= num_held

    def _hold(self, num_bytes: int) -> None:
        if self._num_held_bytes + num_bytes > MAX_HELD_BYTES:
            raise QueueFull("too many bodies are arriving")
        self._num_held_bytes += num_bytes


def parse_json(data: bytes) -> object:
    """Returns the value. Raises InvalidRequest if the text is not JSON, or has too many values."""
    if sum(data.count(mark) for mark in _MARKS) > MAX_JSON_MARKS:
        raise InvalidRequest({"": f"must have at most {MAX_JSON_MARKS} commas, colons and opening brackets"})
    gc.disable()  # else so many new values begin a collection of all objects, which takes longer than parsing
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest({"": "must be JSON"}) from error
    finally:
        gc.enable()


def _too_large() -> InvalidRequest:
    return InvalidRequest({"": f"must have at most {MAX_BODY_BYTES} bytes"})
