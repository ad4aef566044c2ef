"""Bodies are bounded in size, time, memory, number of values and levels; large ones take turns."""

from __future__ import annotations

import asyncio
import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from quire.http import json_bodies
from quire.http.json_bodies import FREE_BYTES, BodyBounds, BodyRefused, JsonBodies, parse_json

MAX_BYTES = 1 << 20
MAX_MARKS = 64_000
BOUNDS = BodyBounds(MAX_BYTES, MAX_MARKS, max_held_bytes=32 << 20, max_held_bytes_of_an_address=16 << 20)


class Request:
    """The part of a request that is read. A body of length -1 never ends, unless `goes_on` is set."""

    content_type = "application/json"

    def __init__(self, *chunks: bytes, content_length: int | None = None, remote: str = "") -> None:
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.content_length = content_length
        self.content = self
        self.goes_on = asyncio.Event()
        self.remote = remote
        self._chunks = chunks

    async def iter_any(self) -> Any:
        for chunk in self._chunks:
            yield chunk
        if self.content_length == -1:
            await self.goes_on.wait()


class Reading:
    """Reads bodies, and keeps from which addresses they came, in the order in which they were parsed."""

    def __init__(self, bounds: BodyBounds = BOUNDS) -> None:
        self.bodies = JsonBodies(bounds)
        self.parsed: list[str] = []

    async def read(self, request: Request) -> object:
        def parse(value: object) -> object:
            self.parsed.append(request.remote)
            return value

        return await self.bodies.read(request, parse)  # type: ignore[arg-type]

    def begin(self, remote: str, size: int) -> asyncio.Task[object]:
        return asyncio.create_task(self.read(Request(json.dumps({"a": "a" * size}).encode(), remote=remote)))

    async def until_idle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def whole(text: bytes) -> bytes:
    return b'{"text": "' + text + b'"}'


async def test_a_body_in_chunks_is_parsed() -> None:
    assert await Reading().read(Request(b'{"te', b'xt": "', b'a"}')) == {"text": "a"}


@pytest.mark.parametrize(
    "request_", [Request(content_length=MAX_BYTES + 1), Request(b"a" * MAX_BYTES, b"a")], ids=["declared", "sent"]
)
async def test_a_body_that_is_too_large_is_refused(request_: Request) -> None:
    with pytest.raises(BodyRefused, match="bytes") as raised:
        await Reading().read(request_)
    assert raised.value.status == 413


async def test_a_body_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "MAX_BODY_S", 0.01)
    with pytest.raises(BodyRefused, match="arrive within") as raised:
        await Reading().read(Request(b"{", content_length=-1))
    assert raised.value.status == 408


async def test_large_bodies_that_never_end_keep_out_large_bodies_only() -> None:
    reading = Reading()
    piece = b" " * (MAX_BYTES - 1)
    each = BOUNDS.max_held_bytes_of_an_address // (len(piece) - FREE_BYTES)
    stuck = [Request(piece, content_length=-1, remote=remote) for remote in ("a", "b") for _ in range(each)]
    reads = [asyncio.create_task(reading.read(request)) for request in stuck]
    await reading.until_idle()
    with pytest.raises(BodyRefused, match="too many bodies") as raised:
        await reading.read(Request(piece, b"1", remote="c"))
    assert raised.value.status == 503
    assert await reading.read(Request(whole(b"a" * (FREE_BYTES - 100)))) is not None
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    assert not reading.bodies._num_held_bytes
    assert await reading.read(Request(piece, b"1", remote="c")) == 1


async def test_bodies_of_one_address_do_not_fill_the_memory_for_all() -> None:
    reading = Reading(BodyBounds(MAX_BYTES, MAX_MARKS, 32 << 20, max_held_bytes_of_an_address=3 * FREE_BYTES))
    await reading.bodies._turns.take("other")
    waiting = [reading.begin("a", 2 * FREE_BYTES), reading.begin("b", 2 * FREE_BYTES)]
    await reading.until_idle()
    with pytest.raises(BodyRefused, match="too many bodies"):
        await reading.begin("a", 4 * FREE_BYTES)
    reading.bodies._turns.end()
    await asyncio.gather(*waiting)
    assert not reading.bodies._num_held_bytes


@pytest.mark.parametrize(
    "data",
    [b"[" * (1 << 20), b"[" + b"{}," * 300_000 + b"{}]", b"[" + b"1," * 500_000 + b"1]", whole(b"," * 200_000)],
)
def test_a_body_with_too_many_values_is_not_parsed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies.json, "loads", lambda data: pytest.fail("it was parsed"))
    with pytest.raises(BodyRefused, match="at most") as raised:
        parse_json(data, MAX_MARKS)
    assert raised.value.status == 413


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 50_000, b'{"a": NaN' + b"}" * 3])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(BodyRefused, match="JSON") as raised:
        parse_json(data, MAX_MARKS)
    assert raised.value.status == 400


def test_no_collection_of_garbage_begins_while_a_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[bool] = []

    def loads(data: bytes) -> object:
        during.append(gc.isenabled())
        return json.JSONDecoder().decode(data.decode())

    monkeypatch.setattr(json_bodies.json, "loads", loads)
    assert parse_json(b"[1]", MAX_MARKS) == [1]
    assert gc.isenabled()
    with pytest.raises(BodyRefused):
        parse_json(b"[1", MAX_MARKS)
    assert gc.isenabled()
    assert during == [False, False]


def test_long_prose_is_accepted() -> None:
    prose = b"One, two, three: this is a sentence [with brackets], as it is found in books. " * 12_000
    assert len(whole(prose)) > 900_000
    assert parse_json(whole(prose), MAX_MARKS)


async def test_large_bodies_are_parsed_one_after_the_other_and_addresses_take_turns() -> None:
    reading = Reading()
    await reading.bodies._turns.take("other")
    large = [reading.begin(remote, FREE_BYTES) for remote in ("a", "a", "a", "b")]
    await reading.until_idle()
    assert reading.parsed == []
    await reading.begin("c", 10)
    assert reading.parsed == ["c"], "a small body does not wait"
    reading.bodies._turns.end()
    await asyncio.gather(*large)
    assert reading.parsed == ["c", "a", "b", "a", "a"]


async def test_a_request_that_is_cancelled_gives_its_turn_back() -> None:
    reading = Reading()
    await reading.bodies._turns.take("other")
    waiting, cancelled, last = (reading.begin("a", FREE_BYTES) for _ in range(3))
    await reading.until_idle()
    cancelled.cancel()
    await reading.until_idle()
    reading.bodies._turns.end()
    waiting.cancel()  # in the iteration of the loop in which it gets its turn
    await asyncio.gather(waiting, cancelled, return_exceptions=True)
    await last
    assert reading.parsed == ["a"]
    assert not reading.bodies._num_held_bytes


@pytest.mark.parametrize(("size", "ran"), [(10, []), (FREE_BYTES, ["another task"])])
async def test_other_tasks_run_between_parsing_and_checking_a_large_body(
    size: int, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[str] = []

    def parse(data: bytes, max_marks: int) -> object:
        asyncio.get_running_loop().call_soon(before.append, "another task")
        return parse_json(data, max_marks)

    monkeypatch.setattr(json_bodies, "parse_json", parse)
    checked = await JsonBodies(BOUNDS).read(Request(whole(b"a" * size)), lambda value: before.copy())  # type: ignore[arg-type]
    assert checked == ran


async def test_the_next_large_body_is_parsed_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "_MAX_SHARE", 1e-9)  # the pause after the first one does not end
    reading = Reading()
    await reading.begin("a", FREE_BYTES)
    second = reading.begin("b", FREE_BYTES)
    await asyncio.sleep(0.05)
    assert reading.parsed == ["a"]
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_the_pause_does_not_grow_with_the_time_of_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def work() -> None:
        now_s[0] += 100.0

    def parse(data: bytes, max_marks: int) -> object:
        asyncio.get_running_loop().call_soon(work)
        return parse_json(data, max_marks)

    monkeypatch.setattr(json_bodies, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(json_bodies, "parse_json", parse)
    reading = Reading()
    async with asyncio.timeout(1):
        await asyncio.gather(*(reading.begin(remote, FREE_BYTES) for remote in ("a", "b")))
    assert reading.parsed == ["a", "b"]
