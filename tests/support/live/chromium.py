"""A real Chromium with the live page of a server; importing the fixtures makes them available."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.e2e.stack import Stack

playwright_api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

# On a busy machine, conditions can take longer than the default of five seconds.
playwright_api.expect.set_options(timeout=60_000)

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH; Debian has the package chromium")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(num_blocks=200, max_num_seqs=8) as stack:
        yield stack


@pytest.fixture
async def browser() -> AsyncIterator["playwright_api.Browser"]:
    async with playwright_api.async_playwright() as playwright:
        # The sandbox needs rights that containers lack, and all pages here are trusted.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture
async def page(stack: Stack, browser: "playwright_api.Browser") -> AsyncIterator["playwright_api.Page"]:
    """Opens the page of an idle server. Checks at the end that the console is empty and that nothing failed."""
    stack.show_log()
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("response", lambda answer: answer.status >= 500 and complaints.append(f"{answer.status} {answer.url}"))
    await page.goto(f"http://{stack.http}/")
    await playwright_api.expect(page.locator("#state")).to_have_text("serving")
    yield page
    await page.close()
    # Chromium itself reports the status 400 of a refused prompt.
    assert [complaint for complaint in complaints if "400 (Bad Request)" not in complaint] == []


async def endlessly(route: "playwright_api.Route") -> None:
    """Makes a completion continue after EOS."""
    sent = route.request.post_data_json
    sent["stopping"]["ignore_eos"] = True
    await route.continue_(post_data=json.dumps(sent))
