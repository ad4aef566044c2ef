"""The scripts of the chat page, each by itself, in a real Chromium."""

from __future__ import annotations

import random

import pytest

from tests.support.gateway.chat_page import opened
from tests.support.gateway.rig import Rig
from tests.support.live.chromium import browser, needs_chromium, playwright_api

__all__ = ["browser"]

pytestmark = needs_chromium

PARSE = """async (cases) => {
    const { eventData } = await import("/page/sse.js");
    const results = [];
    for (const pieces of cases) {
        const body = new ReadableStream({ start(controller) {
            for (const piece of pieces) controller.enqueue(new Uint8Array(piece));
            controller.close();
        } });
        const found = [];
        for await (const data of eventData(body)) found.push(data);
        results.push(found);
    }
    return results;
}"""


def random_stream(draw: random.Random) -> tuple[bytes, list[str]]:
    """Returns the bytes of a stream and the data of its events."""
    text, expected = "\ufeff" if draw.random() < 0.3 else "", []
    for _ in range(draw.randint(0, 5)):
        end = draw.choice(["\n", "\r\n", "\r"])
        data = ["".join(draw.choices("ab :{}é日🦊\u2028", k=draw.randint(0, 6))) for _ in range(draw.randint(0, 3))]
        for each in data:
            other = draw.choice(["", ": comment", "id: 7", "event: x", "database: no", ":"])
            text += f"{other}{end}" if other else ""
            text += "data" + end if not each and draw.random() < 0.5 else f"data: {each}{end}"
        text += end
        expected += ["\n".join(data)] if data else []
    return (text + draw.choice(["", "data: cut off", "data: cut off\n"])).encode(), expected


async def test_events_are_parsed_however_they_are_cut(browser: playwright_api.Browser) -> None:
    draw = random.Random(5)
    cases, expected = [], []
    for _ in range(400):
        stream, data = random_stream(draw)
        cuts = sorted(draw.randrange(len(stream) + 1) for _ in range(draw.choice([0, 1, 3, 2 * len(stream)])))
        pieces = [list(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        cases.append(pieces)
        expected.append(data)
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        assert await page.evaluate(PARSE, cases) == expected


@pytest.mark.parametrize(
    ("href", "name", "shown"),
    [
        ("http://127.0.0.1:8080/", "localhost", "http://127.0.0.1:8080/"),
        ("http://0.0.0.0:8080/", "10.0.0.7", "http://10.0.0.7:8080/"),
        ("http://[::]:8080/", "10.0.0.7", "http://10.0.0.7:8080/"),
        ("http://127.0.0.1:8080/", "10.0.0.7", None),
        ("https://live.example/", "10.0.0.7", "https://live.example/"),
    ],
)
async def test_the_link_leads_to_where_this_browser_can_go(
    browser: playwright_api.Browser, href: str, name: str, shown: str | None
) -> None:
    script = """async ([href, name]) => {
        const { correctLink } = await import("/page/live_page.js");
        const link = document.body.appendChild(document.createElement("a"));
        link.href = href;
        correctLink(link, name);
        return link.isConnected ? link.href : null;
    }"""
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        assert await page.evaluate(script, [href, name]) == shown
