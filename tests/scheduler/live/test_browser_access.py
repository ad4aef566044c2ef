"""Tests that a browser gets into the live page with a key, and not without one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.stack import Stack
from tests.support.live.chromium import browser, needs_chromium, playwright_api
from tests.support.scheduler.callers import WRONG, Callers

__all__ = ["browser"]

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Callers:
    return Callers(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def stack(callers: Callers) -> Iterator[Stack]:
    with Stack(api_keys=callers.path) as stack:
        yield stack


async def test_a_browser_asks_for_a_key_and_uses_it_for_the_whole_page(
    stack: Stack, callers: Callers, browser: "playwright_api.Browser"
) -> None:
    for key, expected in ((callers.keys["admin"], 200), (callers.keys["generate"], 403), (WRONG, 401)):
        context = await browser.new_context(http_credentials={"username": "any", "password": key})
        page = await context.new_page()
        response = await page.goto(f"http://{stack.http}/")
        assert response is not None
        assert response.status == expected
        if expected == 200:
            await playwright_api.expect(page.locator("#state")).to_have_text("serving")
            await page.locator("#prompt-send").click()
            await playwright_api.expect(page.locator("#prompt-status")).to_contain_text("done")
        await context.close()


def test_the_key_file_is_private(callers: Callers) -> None:
    assert Path(callers.path).stat().st_mode & 0o077 == 0
