"""The chat page in a real Chromium, with real services and the embedded model."""

from __future__ import annotations

import pytest

from tests.support.e2e.stack import Stack
from tests.support.e2e.waiting import until
from tests.support.gateway.chat_page import answers, ask, opened
from tests.support.live.chromium import browser, needs_chromium, playwright_api

__all__ = ["browser"]

pytestmark = needs_chromium
QUESTION = "Tell me a story about a fox."


@pytest.mark.timeout(600)
async def test_the_page_shows_what_the_model_says(browser: playwright_api.Browser) -> None:
    async with Stack(gateway=True, gateway_listen="127.0.0.1:0", num_blocks=256) as stack, stack.client() as client:
        expected = await client.complete([{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24)
        async with opened(browser, stack.openai) as page:
            expect = playwright_api.expect
            await expect(page.locator("#live-page")).to_have_attribute("href", f"http://{stack.http}")
            await page.get_by_label("Temperature").fill("0")
            await page.get_by_label("Max tokens").fill("24")
            await ask(page, QUESTION)
            assert await answers(page) == [expected.text]
            await expect(page.locator(".usage")).to_contain_text(f"{expected.prompt_tokens} prompt tokens")
            await expect(page.locator(".usage")).to_contain_text("24 generated · ended by the limit of tokens")

            await page.get_by_label("Max tokens").fill("100000")
            await ask(page, QUESTION)
            await expect(page.get_by_role("alert").last).to_contain_text("100000")

            await page.get_by_label("Max tokens").fill("1500")
            await page.get_by_label("Temperature").fill("2")
            await page.get_by_role("button", name="Regenerate").click()
            await expect(page.locator(".answer").last).not_to_be_empty()
            await page.get_by_role("button", name="Stop").click()
            await expect(page.locator(".usage").last).not_to_be_empty()

        async def is_idle() -> bool:
            summary = await client.pool_summary()
            return summary.num_running + summary.num_waiting == 0

        await until(is_idle, "the blocks of the stopped request are free")
