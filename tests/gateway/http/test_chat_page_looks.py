"""Sizes and colours of the chat page in a real Chromium."""

from __future__ import annotations

import pytest

from tests.support.gateway.chat_page import ask, opened
from tests.support.gateway.rig import Rig
from tests.support.live.chromium import browser, needs_chromium, playwright_api

__all__ = ["browser"]

pytestmark = needs_chromium

CONTRASTS = """() => { // the contrast of every visible text with the colour behind it, as in WCAG 2.2
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const linear = (part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
        const [r, g, b] = parse(colour).map((part) => linear(part / 255));
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const colour = getComputedStyle(each).backgroundColor;
            if ((parse(colour)[3] ?? 1) === 1) return colour;
        }
    };
    const found = {};
    const check = (element, colour, words) => {
        const [a, b] = [light(colour), light(behind(element))].sort((x, y) => y - x);
        found[words] = (a + .05) / (b + .05);
    };
    for (const element of document.body.querySelectorAll("*")) {
        const texts = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
        const words = texts.map((node) => node.data.trim()).join("");
        if (!element.checkVisibility() || element.disabled) continue;
        const colour = getComputedStyle(element).color;
        if (words) check(element, colour, words);
        if (element.placeholder) check(element, getComputedStyle(element, "::placeholder").color, element.name);
        if (element.matches("input, textarea")) check(element, colour, `${element.name} typed`);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 1280])
async def test_the_page_fits_the_window_and_can_be_read(
    browser: playwright_api.Browser, width: int, scheme: str
) -> None:
    async with Rig(key="right", own_key="right", live_page="http://localhost:8080", served_model_name="m" * 80) as rig:
        options = {"viewport": {"width": width, "height": 740}, "color_scheme": scheme}
        async with opened(browser, rig.server.address, **options) as page:
            overflow = "document.documentElement.scrollWidth - innerWidth"
            below = "document.documentElement.scrollHeight - innerHeight"
            if width < 860:
                await page.get_by_text("Settings").click()
            await page.get_by_label("Temperature").fill("hot")
            await ask(page, "x" * 500)
            await playwright_api.expect(page.locator(".answer + .error")).to_contain_text("temperature")
            await playwright_api.expect(page.get_by_label("API key")).to_be_visible()
            assert (await page.evaluate(overflow), await page.evaluate(below)) == (0, 0)
            seen = await page.evaluate(CONTRASTS)
            await page.get_by_label("Temperature").fill("")
            await page.get_by_label("API key").fill("right")
            await page.get_by_role("button", name="Use key").click()
            await playwright_api.expect(page.locator(".usage")).to_contain_text("generated")
            assert (await page.evaluate(overflow), await page.evaluate(below)) == (0, 0)
            seen |= await page.evaluate(CONTRASTS)
    assert {"Live page", "Regenerate", "Send", "seed", "You", "x" * 500, "w0 w1 w2", "refused"} <= seen.keys()
    assert {words: contrast for words, contrast in seen.items() if contrast < 4.5} == {}
