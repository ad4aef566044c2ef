"""Reads JSON bodies, within bounds of size, time, memory and number of values.

`json.loads` is one call that holds the event loop. Its cost depends on the number of values more than on the size, so
the marks between values are counted first. Large bodies are parsed one after the other, with a pause after each.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from gateway.api.errors import ApiError, unavailable
from gateway.api.json_values import MAX_JSON_DEPTH, is_deep
from gateway.http.parsing_turns import ParsingTurns

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_BODY_S = 10.0
"""Time in which a body has to arrive."""

FREE_BYTES = 1 << 16
"""The beginning of each body, which does not count towards MAX_HELD_BYTES. Ordinary requests are no larger, so large
bodies that never end cannot keep them out."""

MAX_HELD_BYTES = 64 << 20
"""Bytes of all bodies that are arriving at the same time, without the first FREE_BYTES of each."""

MAX_HELD_BYTES_OF_AN_ADDRESS = 16 << 20
"""The same for the clients of one network address."""

_MAX_SHARE = 0.1
"""Share of the event loop's time in which bodies of more than FREE_BYTES are parsed."""

MAX_JSON_MARKS = 250_000
"""Most commas, colons and opening brackets of a body, those in strings included. A prompt of 200,000 ids has fewer."""

_ENCODINGS = ("identity", "gzip", "deflate", "br", "zstd")
"""Encodings that aiohttp decodes. It refuses the last two itself where it lacks the packages for them."""

_MARKS = (b",", b":", b"{", b"[")


class RequestBodies:
    """Reads the bodies of all requests of one server."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_held_bytes: Counter[str] = Counter()  # by address
        self._turns = ParsingTurns()

    async def read(self, request: web.Request, parse: Callable[[object], T]) -> T:
        """Returns what `parse` makes of the body. A large body waits for its turn; network addresses take turns.

        Raises ApiError if it is not JSON, too large or too slow, or if other bodies fill the memory that is set aside.
        """
        if request.content_type != "application/json":
            # A form of a web site can send other types without asking the server first.
            raise ApiError("the Content-Type must be application/json", status=415)
        if ", ".join(request.headers.getall("Content-Encoding", ["identity"])).lower() not in _ENCODINGS:
            raise ApiError("the Content-Encoding must be identity, gzip or deflate", status=415)
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large()
        address = request.remote or ""
        data, num_held = bytearray(), 0
        try:
            async with asyncio.timeout(MAX_BODY_S):
                async for chunk in request.content.iter_any():
                    if len(data) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    data += chunk
                    num_more = max(0, len(data) - FREE_BYTES) - num_held
                    self._hold(address, num_more)
                    num_held += num_more
            return await self._parsed(address, bytes(data), parse)
        except TimeoutError:
            raise ApiError(f"the body must arrive within {MAX_BODY_S:g} s", status=408) from None
        except web.RequestPayloadError:
            raise ApiError("the body must have the encoding that its header names") from None
        finally:
            self._num_held_bytes[address] -= num_held
            if not self._num_held_bytes[address]:
                del self._num_held_bytes[address]

    async def _parsed(self, address: str, data: bytes, parse: Callable[[object], T]) -> T:
        if len(data) <= FREE_BYTES:
            return parse(parse_json(data))
        await self._turns.take(address)
        began_s = time.monotonic()
        try:
            return parse(parse_json(data))
        finally:
            pause_s = (1 / _MAX_SHARE - 1) * (time.monotonic() - began_s)
            asyncio.get_running_loop().call_later(pause_s, self._turns.end)

    def _hold(self, address: str, num_bytes: int) -> None:
        if (
            self._num_held_bytes[address] + num_bytes > MAX_HELD_BYTES_OF_AN_ADDRESS
            or self._num_held_bytes.total() + num_bytes > MAX_HELD_BYTES
        ):
            raise unavailable("too many bodies are arriving")
        self._num_held_bytes[address] += num_bytes

    def _too_large(self) -> ApiError:
        return ApiError(f"the body must have at most {self._max_bytes} bytes", status=413)


def parse_json(data: bytes) -> object:
    """Returns the value. Raises ApiError if the text is not JSON, or has too many values or levels."""
    if sum(data.count(mark) for mark in _MARKS) > MAX_JSON_MARKS:
        raise ApiError(f"the body must have at most {MAX_JSON_MARKS} commas, colons and opening brackets", status=413)
    gc.disable()  # else 100,000 new values begin a collection of all objects, which takes longer than parsing
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        raise ApiError("We could not parse the JSON body of your request.") from None
    finally:
        gc.enable()
    if data.count(b"{") + data.count(b"[") > MAX_JSON_DEPTH and is_deep(value):
        raise ApiError(f"the body must have at most {MAX_JSON_DEPTH} levels of lists and objects")
    return value
