"""Takes the screenshots of the chat page, with an answer of the embedded model.

`python -m tests.support.gateway.screenshots` writes docs/screenshots. It needs playwright and Chromium.
"""

import asyncio
import shutil

from playwright.async_api import Browser, async_playwright

from tests.support.e2e.stack import Stack
from tests.support.gateway.chat_page import answers, ask
from tests.support.paths import ROOT

DIRECTORY = ROOT / "docs" / "screenshots"
SIZES = {("desk", "light"): (1100, 700), ("phone", "dark"): (390, 760)}
QUESTION = "Tell me a story about a fox."


async def take(browser: Browser, address: str, kind: str, scheme: str) -> None:
    """Saves one screenshot, with a completed answer."""
    width, height = SIZES[kind, scheme]
    page = await browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
    )
    await page.goto(f"http://{address}/")
    if kind == "desk":
        await page.get_by_label("Temperature").fill("0.7")
        await page.get_by_label("Seed").fill("7")
    await ask(page, QUESTION)
    await answers(page)
    await page.screenshot(path=DIRECTORY / f"chat-{kind}-{scheme}.png")
    await page.close()


async def main() -> None:
    """Takes all screenshots."""
    async with Stack(gateway=True, gateway_listen="127.0.0.1:0") as stack, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for kind, scheme in SIZES:
            await take(browser, stack.openai, kind, scheme)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
