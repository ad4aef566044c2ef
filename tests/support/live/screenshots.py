"""Takes the screenshots of the live page, with streams running on the default pool.

`python -m tests.support.live.screenshots` writes docs/screenshots. It needs playwright and Chromium.
"""

import asyncio
import shutil

from playwright.async_api import Browser, async_playwright

from quire import AsyncClient
from tests.support.e2e.stack import Stack
from tests.support.paths import ROOT

DIRECTORY = ROOT / "docs" / "screenshots"
SIZES = {"desk": (1440, 1000), "phone": (390, 1900)}
SECONDS_TO_FILL = 4.5
PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a fox and a rabbit went to the river.",
    "There was a brave little bird in a tree",
    "Tom found a red box in the garden.",
    "In a small village lived an old baker named Ella.",
)
NUM_CLIENTS = 10
NUM_BLOCKS = 29_127  # the default of the embedded model on a CPU


async def keep_busy(client: AsyncClient, number: int) -> None:
    """Sends one request after the other: one client in four searches with beams, the others sample."""
    prompt = PROMPTS[number % len(PROMPTS)]
    while True:
        if number % 4 == 3:
            await client.complete(
                prompt, request_id=f"beams-{number}", beam_width=4, n=4, max_tokens=300, ignore_eos=True
            )
        else:
            await client.complete(
                prompt * (1 + (7 * number) % 8), request_id=f"story-{number}", n=1 + number % 3, seed=number,
                max_tokens=500 + 60 * number, ignore_eos=True, temperature=0.8,
            )  # fmt: skip


async def take(browser: Browser, address: str, kind: str) -> None:
    """Saves one screenshot, with a completion in the prompt box."""
    width, height = SIZES[kind]
    page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    await page.goto(f"http://{address}/")
    await page.fill("[data-field='stopping.max_tokens']", "400")
    await page.click("#prompt-send")
    await asyncio.sleep(SECONDS_TO_FILL)
    await page.screenshot(path=DIRECTORY / f"live-{kind}-light.png")
    await page.close()


async def main() -> None:
    """Takes all screenshots."""
    async with Stack(num_blocks=NUM_BLOCKS) as stack, stack.client() as client, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        clients = [asyncio.create_task(keep_busy(client, number)) for number in range(NUM_CLIENTS)]
        for kind in SIZES:
            await take(browser, stack.http, kind)
        for task in clients:
            task.cancel()
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
