"""Tests the live page, its events and its prompt box over HTTP."""

import asyncio
import json
import re
import socket

import aiohttp
import pytest

from scheduler.live import page
from scheduler.live.feed import Viewer
from scheduler.live.page import STATIC
from tests.support.live.page_state import PageState
from tests.support.live.served import Served, body, connections, has_safe_headers, read_messages
from tests.support.waiting import until

# --- files ------------------------------------------------------------------------------------------------------------


async def test_the_page_and_all_files_that_it_names_are_served(served: Served, session: aiohttp.ClientSession) -> None:
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


def test_the_page_has_nothing_inline_and_nothing_from_other_hosts() -> None:
    """The page has nothing that its Content-Security-Policy would refuse."""
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>[^<]", page) == []
    assert re.findall(r"\s(?:style|on\w+)=", page) == []
    for path in STATIC.iterdir():
        assert set(re.findall(r"https?://[^\s\"']+", path.read_text())) <= {"http://www.w3.org/2000/svg"}, path


async def test_an_unchanged_file_is_not_sent_again(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{served.url}/live/main.js") as response:
        etag = response.headers["ETag"]
    async with session.get(f"{served.url}/live/main.js", headers={"If-None-Match": etag}) as response:
        assert (response.status, await response.read()) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage.py", "%2e%2e/page.py", ""])
async def test_other_files_are_not_served(served: Served, session: aiohttp.ClientSession, name: str) -> None:
    async with session.get(f"{served.url}/live/{name}") as response:
        assert response.status == 404


# --- events -----------------------------------------------------------------------------------------------------------


async def test_events_show_a_request_and_end_with_the_connection(
    served: Served, session: aiohttp.ClientSession
) -> None:
    page_state = PageState()
    async with session.get(f"{served.url}/live/events") as response:
        assert response.content_type == "text/event-stream"
        assert has_safe_headers(response)
        async with session.post(f"{served.url}/live/completions", json=body(request_id="me")) as completion:
            await completion.read()
        while not (page_state.names and not page_state.sequences):
            page_state.take_event(await response.content.readuntil(b"\n\n"))
    assert set(page_state.names.values()) == {"me"}
    assert page_state.server["num_blocks"] == 300
    await until(lambda: not served.feed._viewers)  # the closed connection was noticed


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_a_server_that_stops_ends_the_event_stream(
    served: Served, session: aiohttp.ClientSession, grace_s: float
) -> None:
    async with session.get(f"{served.url}/live/events") as response:
        await response.content.readuntil(b"\n\n")
        async with asyncio.timeout(20):
            await served.http.stop(grace_s)
        while not response.content.at_eof():
            await response.content.readany()


async def test_a_stream_has_no_header_alone(served: Served, session: aiohttp.ClientSession) -> None:
    """Such a request got frames, which its client takes for the answer to its next one, and a viewer's place."""
    async with session.head(f"{served.url}/live/events") as response:
        assert response.status == 404


async def test_a_viewer_that_reads_nothing_is_disconnected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def large_event(viewer: Viewer, timeout_s: float) -> bytes:
        await asyncio.sleep(0)
        return b": " + bytes(1 << 20) + b"\n\n"

    monkeypatch.setattr(page, "STALLED_VIEWER_S", 0.3)
    monkeypatch.setattr(Viewer, "next_event", large_event)
    host, _, port = served.http.address.rpartition(":")
    with socket.socket() as viewer:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(viewer.connect, (host, int(port)))
        viewer.sendall(b"GET /live/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await until(lambda: bool(connections(served)))
        await until(lambda: not connections(served))


# --- other sites ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
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


async def test_a_form_of_another_site_cannot_request_a_completion(
    served: Served, session: aiohttp.ClientSession
) -> None:
    """Forms can send text/plain without a preflight request, but not JSON."""
    headers = {"Content-Type": "text/plain"}
    async with session.post(f"{served.url}/live/completions", data=json.dumps(body()), headers=headers) as response:
        assert response.status == 400
    async with session.options(f"{served.url}/live/completions", headers={"Origin": "http://a.example"}) as response:
        assert response.status == 405


async def test_the_page_itself_is_served(served: Served, session: aiohttp.ClientSession) -> None:
    for headers in ({"Origin": served.url}, {"Sec-Fetch-Site": "same-origin"}, {}):
        async with session.post(f"{served.url}/live/completions", json=body(), headers=headers) as response:
            assert response.status == 200
            assert "finished" in (await read_messages(response))[-1]
