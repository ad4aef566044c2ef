"""Opens the chat page of a gateway in a real Chromium."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.live.chromium import playwright_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ALLOWED = ("status of 4", "net::ERR_CONNECTION_REFUSED")
"""Chromium itself reports answers with an error status and failed connections, which tests of errors provoke."""


@asynccontextmanager
async def opened(browser: playwright_api.Browser, address: str, **options: Any) -> AsyncIterator[playwright_api.Page]:
    """Yields the page of the gateway at `address`. At the end, checks that its console is empty.

    options  of the browser's context, such as color_scheme
    """
    context = await browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = await context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    await page.goto(f"http://{address}/")
    yield page
    await context.close()
    assert [each for each in complaints if not any(words in each for words in ALLOWED)] == []


async def ask(page: playwright_api.Page, question: str) -> None:
    await page.fill("#question", question)
    await page.press("#question", "Enter")


async def answers(page: playwright_api.Page) -> list[str]:
    """Returns the text of all answers, when none is arriving."""
    await playwright_api.expect(page.locator("#send")).to_be_enabled()
    return [text or "" for text in await page.locator(".answer").all_text_contents()]
