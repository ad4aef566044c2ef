"""Every HTTP route, requested by every kind of caller."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from scheduler.identity.permissions import ROUTES
from scheduler.text.checkpoint import Checkpoint
from tests.support.live.served import Served, body, read_messages
from tests.support.live.serving import serve_page
from tests.support.scheduler.callers import Callers

CALLERS = ("none", "wrong", "generate", "observe", "admin")
OBSERVE = (401, 401, 403, 200, 200)
EXPECTED = {
    ("GET", "/healthz"): (200,) * 5,
    ("GET", "/readyz"): (200,) * 5,
    ("GET", "/metrics"): OBSERVE,
    ("GET", "/"): OBSERVE,
    ("GET", "/live/{name}"): OBSERVE,
    ("GET", "/live/prompt"): OBSERVE,
    ("GET", "/live/events"): OBSERVE,
    ("POST", "/live/completions"): (401, 401, 200, 403, 200),
}


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(tmp_path)


@pytest.fixture
async def guarded(checkpoint: Checkpoint, callers: Callers) -> AsyncIterator[Served]:
    async with serve_page(checkpoint, callers.access()) as served:
        yield served


def routes(served: Served) -> set[tuple[str, str]]:
    found = served.http._runner.app.router.routes()
    return {(route.method, route.resource.canonical) for route in found if route.resource and route.method != "HEAD"}


async def request(session: aiohttp.ClientSession, url: str, method: str, headers: dict[str, str]) -> int:
    json = body(max_tokens=1) if method == "POST" else None
    async with session.request(method, url, headers=headers, json=json) as response:
        if response.status == 401:
            assert response.headers["WWW-Authenticate"].startswith("Basic ")
        if response.status in (401, 403) and method != "HEAD":
            assert (await response.json())["error"]["message"]
        return response.status


@pytest.mark.parametrize("caller", CALLERS)
async def test_each_route_answers_each_caller_as_the_table_says(
    caller: str, guarded: Served, callers: Callers, session: aiohttp.ClientSession
) -> None:
    assert routes(guarded) == set(EXPECTED), "a route that is added later needs a row, here and in permissions.py"
    header = callers.header(caller)
    found = {
        (method, path): await request(session, guarded.url + path.replace("{name}", "main.js"), method, header)
        for method, path in EXPECTED
    }
    assert found == {route: codes[CALLERS.index(caller)] for route, codes in EXPECTED.items()}
    refused = [codes[CALLERS.index(caller)] for codes in EXPECTED.values()]
    assert callers.counted.count("unauthenticated") == refused.count(401)
    assert callers.counted.count("permission_denied") == refused.count(403)
    # HEAD is GET, and missing pages look like the others to strangers.
    assert await request(session, guarded.url + "/metrics", "HEAD", header) == found["GET", "/metrics"]
    missing = await request(session, guarded.url + "/missing", "GET", header)
    assert missing == (401 if caller in ("none", "wrong") else 404)


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_route_without_a_row_is_refused(
    caller: str,
    guarded: Served,
    callers: Callers,
    session: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(ROUTES, ("GET", "/metrics"))
    status = await request(session, guarded.url + "/metrics", "GET", callers.header(caller))
    assert status == (401 if caller in ("none", "wrong") else 403)


async def test_without_an_identity_every_route_is_open(served: Served, session: aiohttp.ClientSession) -> None:
    for method, path in EXPECTED:
        assert await request(session, served.url + path.replace("{name}", "main.js"), method, {}) == 200


async def test_a_key_is_accepted_as_the_password_that_a_browser_asks_for(
    guarded: Served, callers: Callers, session: aiohttp.ClientSession
) -> None:
    for caller, expected in (("admin", 200), ("wrong", 401)):
        basic = base64.b64encode(f"anything:{callers.keys[caller]}".encode()).decode()
        header = {"Authorization": f"Basic {basic}"}
        async with session.post(f"{guarded.url}/live/completions", headers=header, json=body(max_tokens=2)) as response:
            assert response.status == expected
            if expected == 200:
                assert "finished" in (await read_messages(response))[-1]
