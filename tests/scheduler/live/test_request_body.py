"""Bodies are bounded in size, time, memory and number of values."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING

import pytest

from scheduler.core import InvalidRequest, QueueFull
from scheduler.live import request_body
from scheduler.live.request_body import FREE_BYTES, MAX_BODY_BYTES, MAX_HELD_BYTES, RequestBodies, parse_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Request:
    """The part of a request that is read: its length if it was declared, and the chunks of its body."""

    def __init__(self, *chunks: bytes, content_length: int | None = None) -> None:
        self.content_length = content_length
        self.content = self
        self.goes_on = asyncio.Event()
        self._chunks = chunks

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self.content_length == -1:  # never complete
            await self.goes_on.wait()


def whole(text: bytes) -> bytes:
    return b'{"text": "' + text + b'"}'


async def test_a_body_in_chunks_is_parsed() -> None:
    assert await RequestBodies().read_json(Request(b'{"te', b'xt": "', b'a"}')) == {"text": "a"}


@pytest.mark.parametrize(
    "request_",
    [
        Request(content_length=MAX_BODY_BYTES + 1),
        Request(b"a" * MAX_BODY_BYTES, b"a"),
    ],
)
async def test_a_body_that_is_too_large_is_refused(request_: Request) -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        await RequestBodies().read_json(request_)


async def test_a_body_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_BODY_S", 0.01)
    with pytest.raises(InvalidRequest, match="arrive within"):
        await RequestBodies().read_json(Request(b"{", content_length=-1))


async def test_large_bodies_that_never_end_keep_out_large_bodies_only() -> None:
    bodies = RequestBodies()
    piece = b" " * (MAX_BODY_BYTES - 1)
    num_open = MAX_HELD_BYTES // (len(piece) - FREE_BYTES)
    stuck = [Request(piece, content_length=-1) for _ in range(num_open)]
    reads = [asyncio.create_task(bodies.read_json(request)) for request in stuck]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await bodies.read_json(Request(piece, b"1"))
    assert await bodies.read_json(Request(whole(b"a" * (FREE_BYTES - 100)))) is not None
    for request in stuck:
        request.goes_on.set()
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {InvalidRequest}, "blanks are no JSON"
    assert await bodies.read_json(Request(piece, b"1")) == 1


@pytest.mark.parametrize(
    "data",
    [b"[" * (1 << 20), b"[" + b"{}," * 300_000 + b"{}]", b"[" + b"1," * 500_000 + b"1]", whole(b"," * 200_000)],
)
def test_a_body_with_too_many_values_is_not_parsed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body.json, "loads", lambda data: pytest.fail("it was parsed"))
    with pytest.raises(InvalidRequest, match="at most"):
        parse_json(data)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 50_000, b'{"a": NaN' + b"}" * 3])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_json(data)


def test_no_collection_of_garbage_begins_while_a_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[bool] = []

    def loads(data: bytes) -> object:
        during.append(gc.isenabled())
        return json.JSONDecoder().decode(data.decode())

    monkeypatch.setattr(request_body.json, "loads", loads)
    assert parse_json(b"[1]") == [1]
    assert gc.isenabled()
    with pytest.raises(InvalidRequest):
        parse_json(b"[1")
    assert gc.isenabled()
    assert during == [False, False]


def test_long_prose_is_accepted() -> None:
    prose = b"One, two, three: this is a sentence [with brackets], as it is found in books. " * 12_000
    assert len(whole(prose)) > 900_000
    assert parse_json(whole(prose))


async def test_the_loop_runs_between_parsing_and_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two takes milliseconds for a body at its bounds."""
    ran: list[str] = []

    def parse(data: bytes) -> object:
        asyncio.get_running_loop().call_soon(ran.append, "another task")
        return parse_json(data)

    monkeypatch.setattr(request_body, "parse_json", parse)
    assert await RequestBodies().read_json(Request(b"{}")) == {}
    assert ran == ["another task"]
