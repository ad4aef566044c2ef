"""The chat page over HTTP: its files, their headers, and the browsers that get them."""

import re

import pytest

from gateway.http.chat_page import STATIC
from quire.http.static_files import HEADERS
from tests.support.gateway.rig import Rig


async def test_the_page_and_all_files_that_it_names_are_served() -> None:
    async with Rig() as rig:
        async with rig.http.get("/") as response:
            page = await response.text()
            assert response.content_type == "text/html"
            assert HEADERS.items() <= response.headers.items()
        names = set(re.findall(r'(?:src|href)="/page/([^"]+)"', page))
        for script in STATIC.glob("*.js"):
            names |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
        assert names == {path.name for path in STATIC.iterdir()} - {"index.html"}
        for name in names:
            async with rig.http.get(f"/page/{name}") as response:
                assert (response.status, await response.read()) == (200, (STATIC / name).read_bytes())
                assert HEADERS.items() <= response.headers.items()
                etag = response.headers["ETag"]
            async with rig.http.get(f"/page/{name}", headers={"If-None-Match": etag}) as response:
                assert (response.status, await response.read()) == (304, b"")


def test_the_page_has_nothing_inline_and_nothing_from_other_hosts() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>[^<]", page) == []
    assert re.findall(r"\s(?:style|on\w+)=", page) == []
    for path in STATIC.iterdir():
        known = {"http://www.w3.org/2000/svg", "https://html.spec.whatwg.org/multipage/server-sent-events.html."}
        assert set(re.findall(r"https?://[^\s\"']+", path.read_text())) <= known, path
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b", path.read_text()), path


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fchat_page.py", "%2e%2e/server.py", ""])
async def test_other_files_are_not_served(name: str) -> None:
    async with Rig() as rig:
        assert (await rig.get(f"/page/{name}"))[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("10.0.0.7", 200), ("[::1]:8000", 200), ("chat.example", 200), ("evil.example", 403),
     ("CHAT.example.:80", 200), ("[x", 403)],
)  # fmt: skip
async def test_the_page_is_shown_only_under_known_names(host: str, status: int) -> None:
    """Another site can point its own name at this address; then only the name tells."""
    async with Rig(allowed_hosts="chat.example") as rig:
        assert (await rig.get("/", Host=host))[0] == status


@pytest.mark.parametrize(
    ("method", "path", "destination", "status"),
    [("GET", "/", "document", 200), ("GET", "/", "iframe", 403), ("GET", "/page/main.js", "script", 403),
     ("POST", "/v1/chat/completions", "document", 403)],
)  # fmt: skip
async def test_other_sites_may_link_to_the_page_and_nothing_else(
    method: str, path: str, destination: str, status: int
) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": destination}
    async with Rig() as rig:
        async with rig.http.request(method, path, headers=headers) as response:
            assert response.status == status


async def test_the_link_to_the_live_page() -> None:
    async with Rig() as rig:
        assert "live-page" not in (await rig.get("/"))[1]
    async with Rig(live_page='http://live.example/?a=1&b="><script>') as rig:
        page = (await rig.get("/"))[1]
    assert '<a id="live-page" href="http://live.example/?a=1&amp;b=&quot;&gt;&lt;script&gt;">' in page
