"""Reads JSON bodies of requests, within bounds of size, time, memory and number of values.

`json.loads` is one call that holds the event loop. Its cost depends on the number of values more than on the size: a
mebibyte of text takes 1 ms, a mebibyte of `{},` takes 20 ms. So the marks between values are counted first. Large
bodies are parsed one after the other, with a pause after each.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from quire.http.parsing_turns import ParsingTurns
from quire.json_depth import MAX_JSON_DEPTH, is_deep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

MAX_BODY_S = 10.0
"""Time in which a body has to arrive."""

FREE_BYTES = 1 << 16
"""The beginning of each body, which does not count towards `max_held_bytes`. Ordinary requests are no larger, so large
bodies that never end cannot keep them out."""

_MAX_SHARE = 0.1
"""Share of the event loop's time in which bodies of more than FREE_BYTES are parsed."""

_ENCODINGS = ("identity", "gzip", "deflate", "br", "zstd")
"""Encodings that aiohttp decodes. It refuses the last two itself where it lacks the packages for them."""

_MARKS = (b",", b":", b"{", b"[")


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Bounds of the bodies of one server.

    max_bytes                      size of one body, decompressed
    max_marks                      commas, colons and opening brackets of one body, those in strings included
    max_held_bytes                 bytes of all bodies that are arriving, without the first FREE_BYTES of each
    max_held_bytes_of_an_address   the same for the clients of one network address
    """

    max_bytes: int
    max_marks: int
    max_held_bytes: int
    max_held_bytes_of_an_address: int


class BodyRefused(Exception):
    """A body is not read or not used.

    status   the HTTP status: 400, 408, 413 or 415 if the client is at fault; 503 if other bodies fill the memory
    problem  what the body must be ("must be JSON"); the rest of a sentence that begins with "the body"
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


class JsonBodies:
    """Reads the bodies of all requests of one server."""

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds
        self._num_held_bytes: Counter[str] = Counter()  # by address
        self._turns = ParsingTurns()

    async def read(self, request: web.Request, parse: Callable[[object], T]) -> T:
        """Returns what `parse` makes of the body. A large body waits for its turn; network addresses take turns.

        Raises BodyRefused if it is not JSON, too large or too slow, or if other bodies fill the memory that is set
        aside; and what `parse` raises.
        """
        if request.content_type != "application/json":
            # A form of a web site can send other types without asking the server first.
            raise BodyRefused(415, "must have the Content-Type application/json")
        if ", ".join(request.headers.getall("Content-Encoding", ["identity"])).lower() not in _ENCODINGS:
            raise BodyRefused(415, "must have the Content-Encoding identity, gzip or deflate")
        if request.content_length is not None and request.content_length > self._bounds.max_bytes:
            raise self._too_large()
        address = request.remote or ""
        data, num_held = bytearray(), 0
        try:
            async with asyncio.timeout(MAX_BODY_S):
                async for chunk in request.content.iter_any():
                    if len(data) + len(chunk) > self._bounds.max_bytes:
                        raise self._too_large()
                    data += chunk
                    num_more = max(0, len(data) - FREE_BYTES) - num_held
                    self._hold(address, num_more)
                    num_held += num_more
            return await self._parsed(address, bytes(data), parse)
        except TimeoutError:
            raise BodyRefused(408, f"must arrive within {MAX_BODY_S:g} s") from None
        except web.RequestPayloadError:
            raise BodyRefused(400, "must have the encoding that its header names") from None
        finally:
            self._num_held_bytes[address] -= num_held
            if not self._num_held_bytes[address]:
                del self._num_held_bytes[address]

    async def _parsed(self, address: str, data: bytes, parse: Callable[[object], T]) -> T:
        if len(data) <= FREE_BYTES:
            return parse(parse_json(data, self._bounds.max_marks))
        await self._turns.take(address)
        times_s: list[float] = []
        try:
            with _measured(times_s):
                value = parse_json(data, self._bounds.max_marks)
            await asyncio.sleep(0)  # other tasks run between the two, each of which takes milliseconds
            with _measured(times_s):
                return parse(value)
        finally:
            asyncio.get_running_loop().call_later((1 / _MAX_SHARE - 1) * sum(times_s), self._turns.end)

    def _hold(self, address: str, num_bytes: int) -> None:
        if (
            self._num_held_bytes[address] + num_bytes > self._bounds.max_held_bytes_of_an_address
            or self._num_held_bytes.total() + num_bytes > self._bounds.max_held_bytes
        ):
            raise BodyRefused(503, "must wait: too many bodies are arriving")
        self._num_held_bytes[address] += num_bytes

    def _too_large(self) -> BodyRefused:
        return BodyRefused(413, f"must have at most {self._bounds.max_bytes} bytes")


@contextmanager
def _measured(times_s: list[float]) -> Iterator[None]:
    """Adds the time that the block takes, in seconds."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        times_s.append(time.monotonic() - began_s)


def parse_json(data: bytes, max_marks: int) -> object:
    """Returns the value. Raises BodyRefused if the text is not JSON, or has too many values or levels."""
    if sum(data.count(mark) for mark in _MARKS) > max_marks:
        raise BodyRefused(413, f"must have at most {max_marks} commas, colons and opening brackets")
    gc.disable()  # else so many new values begin a collection of all objects, which takes longer than parsing
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        raise BodyRefused(400, "must be JSON") from None
    finally:
        gc.enable()
    if data.count(b"{") + data.count(b"[") > MAX_JSON_DEPTH and is_deep(value):
        raise BodyRefused(400, f"must have at most {MAX_JSON_DEPTH} levels of lists and objects")
    return value
