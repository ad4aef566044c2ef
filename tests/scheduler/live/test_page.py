"""The page, its events and its prompt box over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from scheduler.core import BlockState, InvalidRequest
from scheduler.live.browser_safety import HEADERS
from scheduler.live.completions import read_fields
from scheduler.live.page import STATIC
from tests.scheduler.live.conftest import Served
from tests.support.live.picture import Picture
from tests.support.scheduler.validator_rig import Unread
from tests.support.waiting import until


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


def body(text: Any = "once upon a time", max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {"text": text, "stopping": {"max_tokens": max_tokens, "ignore_eos": True}} | fields


def chat(messages: Any) -> dict[str, Any]:
    return {"chat": {"messages": messages}}


async def messages(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in response.content]


def is_idle(served: Served) -> bool:
    found = served.engine.block_map()
    return not found.num_running and not any(block.state is BlockState.ACTIVE for block in found.blocks)


def has_safe_headers(response: aiohttp.ClientResponse) -> bool:
    return all(response.headers.get(name) == value for name, value in HEADERS.items())


# --- files ------------------------------------------------------------------------------------------------------------


async def test_the_page_and_all_that_it_names(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{served.url}/") as response:
        page = await response.text()
        assert response.content_type == "text/html"
        assert has_safe_headers(response)
    names = set(re.findall(r'(?:src|href)="/live/([^"]+)"', page))
    for script in STATIC.glob("*.js"):
        names |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
    assert names == {path.name for path in STATIC.iterdir()} - {"index.html"}
    for name in names:
        async with session.get(f"{served.url}/live/{name}") as response:
            assert (response.status, await response.read()) == (200, (STATIC / name).read_bytes())
            assert has_safe_headers(response)


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    """What the Content-Security-Policy would refuse is not there in the first place."""
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>[^<]", page) == []
    assert re.findall(r"\s(?:style|on\w+)=", page) == []
    for path in STATIC.iterdir():
        assert set(re.findall(r"https?://[^\s\"']+", path.read_text())) <= {"http://www.w3.org/2000/svg"}, path


async def test_a_file_that_is_known_is_not_sent_again(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{served.url}/live/main.js") as response:
        etag = response.headers["ETag"]
    async with session.get(f"{served.url}/live/main.js", headers={"If-None-Match": etag}) as response:
        assert (response.status, await response.read()) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage.py", "%2e%2e/page.py", ""])
async def test_no_other_file(served: Served, session: aiohttp.ClientSession, name: str) -> None:
    async with session.get(f"{served.url}/live/{name}") as response:
        assert response.status == 404


# --- events -----------------------------------------------------------------------------------------------------------


async def test_events(served: Served, session: aiohttp.ClientSession) -> None:
    picture = Picture()
    async with session.get(f"{served.url}/live/events") as response:
        assert response.content_type == "text/event-stream"
        assert has_safe_headers(response)
        async with session.post(f"{served.url}/live/completions", json=body(request_id="me")) as completion:
            await completion.read()
        while not (picture.names and not picture.sequences):
            picture.take_event(await response.content.readuntil(b"\n\n"))
    assert set(picture.names.values()) == {"me"}
    assert picture.server["num_blocks"] == 300
    await until(lambda: not served.feed._viewers)  # it was noticed that nobody looks any more


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_a_server_that_stops_ends_the_stream(
    served: Served, session: aiohttp.ClientSession, grace_s: float
) -> None:
    async with session.get(f"{served.url}/live/events") as response:
        await response.content.readuntil(b"\n\n")
        async with asyncio.timeout(20):
            await served.http.stop(grace_s)
        while not response.content.at_eof():
            await response.content.readany()


# --- completions ------------------------------------------------------------------------------------------------------


async def test_a_completion_streams(served: Served, session: aiohttp.ClientSession) -> None:
    request = body(request_id="me", sampling={"n": 2, "temperature": 0.5, "seed": None})
    async with session.post(f"{served.url}/live/completions", json=request) as response:
        assert response.status == 200
        assert has_safe_headers(response)
        started, *rest = await messages(response)
    assert started["started"]["request_id"] == "me"
    finished = [message["finished"] for message in rest if "finished" in message]
    assert sorted(message["index"] for message in finished) == [0, 1]
    assert {message["usage"]["completion_tokens"] for message in finished} == {20}
    assert "".join(message["delta"]["text"] for message in rest if "delta" in message)


async def test_what_the_prompt_box_may_send(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{served.url}/live/prompt") as response:
        assert await response.json() == {"has_chat_template": False}
        assert has_safe_headers(response)


async def test_closing_the_connection_frees_the_blocks(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{served.url}/live/completions", json=body(max_tokens=380)) as response:
        await response.content.readline()
        served.client.is_hanging = True  # it is in the middle, and stays there
        await until(lambda: served.engine.core is not None and served.engine.core.num_in_flight == 2)
        response.close()
    core = served.engine.core
    assert core is not None
    await until(lambda: not core.num_unfinished_requests)
    # Plans in flight may still write to its blocks: with the executor that has them they are lost.
    served.client.is_hanging = False
    served.client.lose()
    await until(lambda: is_idle(served))


async def test_closing_the_connection_takes_a_request_out_of_the_queue(
    served: Served, session: aiohttp.ClientSession
) -> None:
    """Nothing is ever written to it: its end is noticed all the same."""
    served.client.is_hanging = True
    asking = [
        asyncio.create_task(session.post(f"{served.url}/live/completions", json=body(max_tokens=300)))
        for _ in range(30)
    ]
    core = served.engine.core
    assert core is not None
    await until(lambda: core.num_waiting > 0)
    for task in asking:
        task.cancel()
    for response in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(response, aiohttp.ClientResponse):  # its headers had come
            response.close()
    await until(lambda: not core.num_waiting and not core.num_unfinished_requests)


@pytest.mark.parametrize(
    ("sent", "fields"),
    [
        (body(text=5, max_tokens=-1), {"text", "stopping.max_tokens"}),
        (body(sampling={"temperature": "hot", "n": 0, "top_p": 2}),
         {"sampling.temperature", "sampling.n", "sampling.top_p"}),
        (body(stop="x", sampling={"tempreature": 1}), {"stop", "sampling.tempreature"}),
        (body(sampling=[1]), {"sampling"}),
        (body(stopping={"stop": "x", "ignore_eos": 1}), {"stopping.stop", "stopping.ignore_eos"}),
        (body(sampling={"logit_bias": {"1": 2}}), {"sampling.logit_bias"}),
        (body(request_id="\n"), {"request_id"}),
        (chat([{"role": "user", "content": "hello"}]), {"chat"}),  # this model has no template
        (chat("hello"), {"chat.messages"}),
        (chat(["hello"]), {"chat.messages"}),
        (chat([{"role": "user", "text": "hello"}]), {"chat.messages[0].text"}),
        (chat([{"role": 1, "content": ["hello"]}]), {"chat", "chat.messages[0].role", "chat.messages[0].content"}),
        (body(chat={"messages": []}), {"prompt", "chat", "chat.messages"}),
        ({}, {"prompt"}),
        ([], {""}),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_by_field(
    served: Served, session: aiohttp.ClientSession, sent: Any, fields: set[str]
) -> None:
    async with session.post(f"{served.url}/live/completions", json=sent) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "INVALID_ARGUMENT")
        assert has_safe_headers(response)
    assert {violation["field"] for violation in error["violations"]} == fields
    assert all(violation["problem"] for violation in error["violations"])


async def test_an_answer_does_not_grow_with_what_is_wrong(served: Served, session: aiohttp.ClientSession) -> None:
    keys = {f"{number}": number for number in range(10_000)}
    some = dict.fromkeys(list(keys)[:300], 0)  # a thousand of these are still a body that is looked into
    many = {"text": "x"}, {"sampling": keys}, {"stopping": keys}, keys, chat([some] * 1000), chat([{}] * 10_000)
    for sent in many[1:]:
        async with session.post(f"{served.url}/live/completions", json=many[0] | sent) as response:
            answer = await response.text()
            assert response.status == 400
            assert len(answer) < 10_000
        violations = json.loads(answer)["error"]["violations"]
        assert 1 <= len(violations) <= 64
        assert all(violation["field"] for violation in violations), "refused as a whole"


def test_what_is_too_large_is_not_looked_into() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_fields(chat(Unread([{}] * 1025)))
    assert refused.value.violations == {"chat.messages": "must be at most 1024, not 1025"}


def test_keys_that_are_fields_are_found_among_any_others() -> None:
    keys = {f"{'k' * 40}{number}": number for number in range(200)}  # all told by the same 40 characters
    with pytest.raises(InvalidRequest) as refused:
        read_fields({"text": "x", "sampling": {"n": 2, "seed": None}, **keys})
    assert list(refused.value.violations) == ["k" * 40]
    assert read_fields({"text": "x", "sampling": {"n": 2, "seed": None}}).values == {"text": "x", "sampling.n": 2}


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b'{"text": "a" * 3}'])
async def test_what_is_no_json(served: Served, session: aiohttp.ClientSession, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{served.url}/live/completions", data=data, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["violations"][0]["problem"] == "must be JSON"


@pytest.mark.parametrize("tells_its_length", [False, True])
async def test_a_body_that_nobody_needs(served: Served, session: aiohttp.ClientSession, tells_its_length: bool) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 2**20

    data = b" " * (9 * 2**20) if tells_its_length else endless()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{served.url}/live/completions", data=data, headers=headers) as response:
        assert response.status == 400
        assert "at most" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"{", b'{"text": "x", "tempreature": 1}', b" " * (2**23 + 1), json.dumps(chat([{}] * 1025)).encode()]
)
async def test_what_the_door_refuses_is_counted_and_logged_as_what_the_intake_does(
    served: Served, session: aiohttp.ClientSession, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Type": "application/json", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    with caplog.at_level("INFO", "scheduler.requests"):
        async with session.post(f"{served.url}/live/completions", data=data, headers=headers) as response:
            assert response.status == 400
    (record,) = (vars(record) for record in caplog.records if record.name == "scheduler.requests")
    told = {name: record[name] for name in ("msg", "status", "client", "trace_id")}
    assert told == {
        "msg": "request refused",
        "status": "invalid_argument",
        "client": "127.0.0.1",
        "trace_id": "a" * 32,
    }
    async with session.get(f"{served.url}/metrics") as response:
        counts = [line for line in (await response.text()).splitlines() if "requests_rejected_total{" in line]
    assert [line for line in counts if 'reason="invalid_argument"' in line and line.endswith(" 1.0")]


async def test_what_can_never_fit_and_who_is_not_there(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{served.url}/live/completions", json=body(max_tokens=5000)) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "OUT_OF_RANGE")
    await served.engine.drain()
    async with session.post(f"{served.url}/live/completions", json=body()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "UNAVAILABLE")


# --- other sites ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_pages_of_other_origins_are_refused(
    served: Served, session: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with session.post(f"{served.url}/live/completions", json=body(), headers=headers) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers
    async with session.get(f"{served.url}/live/events", headers=headers) as response:
        assert response.status == 403
    assert served.engine.new_request_id() == 1  # no request was made


async def test_a_form_of_another_site_cannot_ask(served: Served, session: aiohttp.ClientSession) -> None:
    """Forms can send text/plain without asking first; JSON they cannot."""
    headers = {"Content-Type": "text/plain"}
    async with session.post(f"{served.url}/live/completions", data=json.dumps(body()), headers=headers) as response:
        assert response.status == 415
    async with session.options(f"{served.url}/live/completions", headers={"Origin": "http://a.example"}) as response:
        assert response.status == 405


async def test_the_page_itself_is_served(served: Served, session: aiohttp.ClientSession) -> None:
    for headers in ({"Origin": served.url}, {"Sec-Fetch-Site": "same-origin"}, {}):
        async with session.post(f"{served.url}/live/completions", json=body(), headers=headers) as response:
            assert response.status == 200
            assert "finished" in (await messages(response))[-1]
