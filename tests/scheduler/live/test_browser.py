"""Tests the page in a real Chromium, with a real server and the embedded model."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quire import AsyncClient, BlockState, ChatMessage, UnavailableError
from tests.support.e2e.stack import Stack
from tests.support.e2e.waiting import until
from tests.support.live.chromium import browser, endlessly, needs_chromium, page, playwright_api, stack

__all__ = ["browser", "page", "stack"]

pytestmark = needs_chromium

STARTED = {"request_id": "me", "prompt_tokens": 1, "continuation": ""}
PIXELS = "canvas => canvas.toDataURL()"


@asynccontextmanager
async def load(stack: Stack, num_clients: int = 4) -> AsyncIterator[AsyncClient]:
    """Runs clients that request completions again and again."""
    async with stack.client() as client:

        async def ask(name: str) -> None:
            while True:
                try:
                    await client.complete("Once upon a time", request_id=name, max_tokens=60, n=2, ignore_eos=True)
                except UnavailableError:  # connecting can take too long while a browser uses the processors
                    await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:  # a client that fails ends the test with its error
            tasks = [group.create_task(ask(f"client-{i}")) for i in range(num_clients)]
            try:
                yield client
            finally:
                for task in tasks:
                    task.cancel()


async def num_active(client: AsyncClient) -> int:
    return (await client.block_map()).num_blocks(BlockState.ACTIVE)


async def test_all_parts_of_the_page_change_under_load(stack: Stack, page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    grid, timeline = page.locator("#pool-grid"), page.locator("#batch-timeline")
    seen: dict[str, set[str]] = {"grid": set(), "timeline": set()}
    async with load(stack):
        await expect(page.locator("#running")).not_to_have_text("0")

        async def have_changed() -> bool:
            seen["grid"].add(await grid.evaluate(PIXELS))
            seen["timeline"].add(await timeline.evaluate(PIXELS))
            return all(len(pictures) >= 4 for pictures in seen.values())

        await until(have_changed)
        await expect(page.locator(".sequence h3").first).to_contain_text("client-")
        assert "→" in await page.locator(".sequence ol li").first.inner_text()
        await expect(page.locator("#paged-waste")).to_contain_text("%")
        await expect(page.locator("#contiguous-words")).to_contain_text("slots used")
        await expect(page.locator("#batch-now")).to_contain_text("decoding")
        await expect(page.locator("#waiting")).to_be_visible()
    await expect(page.locator("#running")).to_have_text("0")
    await expect(page.locator(".sequence")).to_have_count(0)
    await expect(page.locator("#occupancy")).to_have_text("0%")


async def test_the_prompt_box_streams(page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    await page.fill("[data-field='text']", "Once upon a time")
    await page.fill("[data-field='stopping.max_tokens']", "40")
    await page.fill("[data-field='sampling.n']", "2")
    await page.press("[data-field='text']", "Control+Enter")
    await expect(page.locator("#prompt-status")).to_contain_text("done")
    outputs = await page.locator("#prompt-output p").all_inner_texts()
    assert len(outputs) == 2
    assert all(text.startswith("Once upon a time") and len(text) > 40 for text in outputs)
    await expect(page.locator("#prompt-send")).to_be_enabled()


async def test_the_prompt_box_sends_a_chat(stack: Stack, page: "playwright_api.Page") -> None:
    """The server applies the model's template to the message, as it does for other clients."""
    expect = playwright_api.expect
    message = "Tell me a story about a fox."
    async with stack.client() as client:
        answer = await client.complete([ChatMessage("user", message)], temperature=0, max_tokens=24)
        assert answer.texts != (await client.complete(message, temperature=0, max_tokens=24)).texts
    await page.check("#prompt-chat")
    await expect(page.locator("#prompt-label")).to_have_text("Message to answer")
    await page.fill("#prompt-text", message)
    await page.fill("[data-field='sampling.temperature']", "0")
    await page.fill("[data-field='stopping.max_tokens']", "24")
    await page.click("#prompt-send")
    await expect(page.locator("#prompt-status")).to_contain_text("done: ")
    assert await page.locator("#prompt-output p").text_content() == f"{message}\n{answer.texts[0]}"


async def test_the_output_begins_with_the_prompt_that_was_sent(page: "playwright_api.Page") -> None:
    """The box can hold another text before the first token arrives."""
    is_changed = asyncio.Event()

    async def wait(route: "playwright_api.Route") -> None:
        await is_changed.wait()
        await route.continue_()

    await page.route("**/live/completions", wait)
    await page.fill("#prompt-text", "Once upon a time")
    await page.fill("[data-field='stopping.max_tokens']", "3")
    await page.click("#prompt-send")
    await page.fill("#prompt-text", "One day")
    is_changed.set()
    await playwright_api.expect(page.locator("#prompt-status")).to_contain_text("done")
    assert await page.locator("#prompt-output .given").text_content() == "Once upon a time"


async def test_a_prompt_is_done_when_all_its_samples_have_ended(page: "playwright_api.Page") -> None:
    expect, status = playwright_api.expect, page.locator("#prompt-status")

    def ended(index: int, num_tokens: int, reason: str) -> list[str]:
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
        end = {"finished": {"index": index, "reason": f"FINISH_REASON_{reason}", "usage": usage}}
        return [json.dumps(message) + "\n" for message in ({"delta": {"index": index, "text": f"w{index}"}}, end)]

    await page.evaluate(
        """() => {
            const body = new TransformStream();
            const [writer, encoder] = [body.writable.getWriter(), new TextEncoder()];
            window.fetch = async () => new Response(body.readable);
            window.receive = (lines) => lines.forEach((line) => writer.write(encoder.encode(line)));
            window.end = () => writer.close();
        }"""
    )
    await page.click("#prompt-send")
    await page.evaluate("lines => receive(lines)", [json.dumps({"started": STARTED}) + "\n", *ended(0, 4, "STOP")])
    await expect(page.locator("#prompt-output p")).to_contain_text("w0")
    await expect(status).to_have_text("me: 1 prompt tokens")
    await page.evaluate("lines => receive(lines)", ended(1, 7, "LENGTH"))
    await page.evaluate("end()")
    await expect(status).to_have_text("done: 4 tokens, ended by stop; 7 tokens, ended by length")


async def test_the_buttons_of_the_prompt_keep_the_focus(page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    is_open = asyncio.Event()

    async def wait(route: "playwright_api.Route") -> None:
        await is_open.wait()
        await route.continue_()

    await page.route("**/live/completions", wait)
    await page.fill("[data-field='stopping.max_tokens']", "3")
    await page.focus("#prompt-send")
    await page.keyboard.press("Enter")
    await expect(page.locator("#prompt-cancel")).to_be_focused()
    is_open.set()
    await expect(page.locator("#prompt-status")).to_contain_text("done")
    await expect(page.locator("#prompt-send")).to_be_focused()


async def test_the_blocks_of_a_cancelled_request_become_free(stack: Stack, page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    await page.route("**/live/completions", endlessly)
    await page.fill("[data-field='stopping.max_tokens']", "1900")
    await page.fill("[data-field='sampling.n']", "8")  # far more than the pool holds at once, so that it runs for long
    await page.click("#prompt-send")
    await expect(page.locator(".sequence").first).to_be_visible()
    await page.click("#prompt-cancel")
    await expect(page.locator("#prompt-status")).to_contain_text("cancelled")
    await expect(page.locator(".sequence")).to_have_count(0)
    await expect(page.locator("#pool-sizes")).to_contain_text("0 active")
    async with stack.client() as client:
        assert await num_active(client) == 0
        assert not (await client.block_map()).sequences


async def test_the_progress_of_a_prefill_is_a_bar(page: "playwright_api.Page") -> None:
    """It is shown for a sequence that computes its prompt, and not for one that decodes."""
    found = await page.evaluate(
        """async () => {
            const { Model } = await import("/live/model.js");
            const { BlockTables } = await import("/live/tables.js");
            const list = document.body.appendChild(document.createElement("div"));
            const tables = new BlockTables(list, document.createElement("p"), () => {});
            const model = new Model();
            model.apply({ is_key: true, server: { num_blocks: 9 }, numbers: {},
                          come: [["7.0", "long", 100_000], ["8.0", "short", 3]],
                          sequences: [["7.0", 0, 100_000, 25_000, 0, 1], ["8.0", 1, 5, 4, 0, 2]] });
            tables.show(model);
            const read = () => [...list.querySelectorAll("progress")].map((bar) => [bar.hidden, bar.value]);
            const words = list.querySelector(".muted").textContent;
            const first = read();
            model.apply({ sequences: [["7.0", 0, 100_001, 100_000, 1]], numbers: {} });
            tables.show(model);
            return [words, first, read()];
        }"""
    )
    assert found == ["slot 0 · prefill 25,000 of 100,000 tokens", [[False, 0.25], [True, 1]], [[True, 1], [True, 1]]]


async def test_many_deltas_are_laid_out_together(page: "playwright_api.Page") -> None:
    """Laying out long paragraphs for every delta would block the page's thread, and with it the cancel button."""
    num_samples, num_deltas = 4, 4000
    deltas = [{"delta": {"index": i % num_samples, "text": f" {i}"}} for i in range(num_deltas)]
    usage = {"prompt_tokens": 1, "completion_tokens": num_deltas}
    ends = [{"finished": {"index": i, "reason": "FINISH_REASON_LENGTH", "usage": usage}} for i in range(num_samples)]
    body = "".join(json.dumps(message) + "\n" for message in deltas + ends)
    await page.route("**/live/completions", lambda route: route.fulfill(body=body, content_type="application/x-ndjson"))
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Performance.enable")

    async def num_layouts() -> float:
        metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "LayoutCount")

    before = await num_layouts()
    await page.click("#prompt-send")
    await playwright_api.expect(page.locator("#prompt-status")).to_contain_text("done: 4000 tokens")
    assert await num_layouts() - before < num_deltas / 4
    outputs = await page.locator("#prompt-output p").all_text_contents()
    assert [text.split()[-2:] for text in outputs] == [[str(3992 + i), str(3996 + i)] for i in range(num_samples)]


async def test_violations_are_shown_at_their_fields(page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    await page.fill("[data-field='sampling.temperature']", "hot")
    await page.fill("[data-field='stopping.max_tokens']", "0")
    await page.click("#prompt-send")
    temperature = page.locator("[data-field='sampling.temperature']")
    await expect(temperature).to_have_attribute("aria-invalid", "true")
    await expect(page.locator("#error-sampling-temperature")).to_contain_text("must be a number")
    await expect(page.locator("#error-stopping-max_tokens")).to_contain_text("must be a whole number")
    await temperature.fill("1")
    await page.fill("[data-field='stopping.max_tokens']", "3")
    await page.click("#prompt-send")
    await expect(page.locator("#prompt-status")).to_contain_text("done: 3 tokens")
    await expect(page.locator("[aria-invalid]")).to_have_count(0)


async def test_the_grid_can_be_used_by_keyboard(page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    readout = page.locator("#pool-readout output")
    await page.focus("#pool-grid")
    await expect(readout).to_contain_text("Block 1:")
    await page.keyboard.press("ArrowRight")
    await expect(readout).to_contain_text("Block 2:")
    await page.keyboard.press("End")
    await expect(readout).to_contain_text("Block 199:")
    await page.keyboard.press("Home")
    await expect(readout).to_contain_text("Block 1:")


async def test_a_large_pool_is_drawn_and_scrolls(page: "playwright_api.Page") -> None:
    """The whole pool of 100,000 blocks is drawn: every other one is cached, and the last one active."""
    found = await page.evaluate(
        """async () => {
            const { Model } = await import("/live/model.js");
            const { PoolGrid } = await import("/live/pool_grid.js");
            const scroller = document.body.appendChild(document.createElement("div"));
            scroller.style.width = "700px";
            const canvas = scroller.appendChild(document.createElement("canvas"));
            const model = new Model();
            const grid = new PoolGrid(canvas, document.createElement("output"), model);
            const blocks = Array.from({ length: 49_999 }, () => [1, 1, -1]).flat();
            model.apply({ is_key: true, server: { num_blocks: 100_000 }, blocks: [...blocks, 1, 1, 1], numbers: {},
                          come: [["7.0", "me", 3]], sequences: [["7.0", 0, 5, 4, 0, 100_000]] });
            grid.layOut(700);
            const begunMs = performance.now();
            grid.showWhole(true);
            const drawnMs = performance.now() - begunMs;
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const columns = Math.floor(700 / 3);
            const colour = (block) => {
                const [x, y] = [((block - 1) % columns) * 3, Math.floor((block - 1) / columns) * 3];
                return pixels.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 4).join();
            };
            return { drawnMs, width: canvas.width, height: canvas.height, words: model.describe(100_000),
                     colours: [colour(1), colour(2), colour(3), colour(4), colour(100_000)] };
        }"""
    )
    assert (found["width"], found["height"]) == (699, 430 * 3)
    first, second, third, fourth, last = found["colours"]
    assert (first, second) == (third, fourth)
    assert len({first, second, last}) == 3
    assert found["words"] == "Block 100000: active, ref count 1. me (logical 0)"
    print(f"drawn in {found['drawnMs']:.0f} ms")


async def test_the_timeline_shows_beams_only_in_steps_in_which_they_compute(page: "playwright_api.Page") -> None:
    """The steps are two chunks of a prompt beside a decode, a branch into two slots, and the decode alone."""
    columns = await page.evaluate(
        """async () => {
            const { Batch } = await import("/live/batch.js");
            const batch = new Batch();
            batch.apply({ is_key: true, rows: [[0, "1.0", 1]], steps: [
                [2, 16, [], [1, "2.0"], [1, 15]], [3, 16, [], [], [], [], [1]],
                [4, 3, [], [1, "2.0", 2, "2.1"], [1, 1, 2, 1], [], [1, 2]], [5, 1] ] });
            return batch.columns.map(({ cells }) => cells.map(({ slot, key, tokens }) => [slot, key, tokens]));
        }"""
    )
    decode, chunk = [0, "1.0", 1], [1, "2.0", 15]
    assert columns == [[decode, chunk], [decode, chunk], [decode, [1, "2.0", 1], [2, "2.1", 1]], [decode]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
async def test_the_page_fits_the_width_of_the_window(
    stack: Stack, browser: "playwright_api.Browser", width: int, scheme: str
) -> None:
    page = await browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    await page.goto(f"http://{stack.http}/")
    await playwright_api.expect(page.locator("#state")).to_have_text("serving")
    await playwright_api.expect(page.locator("#pool-sizes")).to_contain_text("tokens a block")
    await page.locator("#model").evaluate("model => model.textContent = 'm'.repeat(80)")  # names can be long
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    await page.close()


async def test_a_hidden_page_closes_its_connection(stack: Stack, page: "playwright_api.Page") -> None:
    """It closes its event stream, and opens it again when it is shown."""
    hide = """isHidden => {
        Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    words = page.locator("#batch-now")
    async with stack.client() as client:
        await client.complete("Once upon a time", max_tokens=5, ignore_eos=True)
        await playwright_api.expect(words).to_contain_text("Step")
        await page.evaluate(hide, True)
        before = await words.inner_text()
        await client.complete("Once upon a time", max_tokens=20, ignore_eos=True)
        await asyncio.sleep(0.6)
        assert await words.inner_text() == before
        await page.evaluate(hide, False)
        await client.complete("Once upon a time", max_tokens=20, ignore_eos=True)
    await playwright_api.expect(words).not_to_have_text(before)
