"""Tests in a real Chromium how the page folds and zooms the block pool."""

from tests.support.live.chromium import browser, needs_chromium, page, playwright_api, stack

__all__ = ["browser", "page", "stack"]

pytestmark = needs_chromium


async def test_unused_blocks_of_a_large_pool_fold_into_gaps(page: "playwright_api.Page") -> None:
    """Blocks 101 to 400 are cached and block 20,000 is active; the free blocks between fold into gaps."""
    found = await page.evaluate(
        """async () => {
            const { Model } = await import("/live/model.js");
            const { PoolGrid } = await import("/live/pool_grid.js");
            const scroller = document.body.appendChild(document.createElement("div"));
            const canvas = scroller.appendChild(document.createElement("canvas"));
            const output = document.createElement("output");
            const model = new Model();
            const grid = new PoolGrid(canvas, output, model);
            model.apply({ is_key: true, server: { num_blocks: 29_000 }, numbers: {}, come: [["7.0", "me", 3]],
                          blocks: [100, 300, -1, 19_599, 1, 1], sequences: [["7.0", 0, 5, 4, 0, 20_000]] });
            grid.layOut(700);
            const heights = [canvas.clientHeight];
            const words = [];
            canvas.tabIndex = 0;
            canvas.focus();
            for (const key of ["End", "ArrowLeft", "ArrowUp", "ArrowUp"]) {
                canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
                words.push(output.textContent);
            }
            const gap = model.blocks.findLastIndex((value, block) => value === 0 && block < 19_965);
            grid.draw(model.apply({ blocks: [gap - 1, 1, -1], numbers: {} }));
            heights.push(canvas.clientHeight);
            grid.draw(model.apply({ blocks: [gap - 1, 1, 0], numbers: {} }));
            const kept = scroller.clientHeight;
            grid.showWhole(true);
            heights.push(canvas.clientHeight);
            return { heights, words, kept };
        }"""
    )
    folded, reopened, whole = found["heights"]
    assert folded < reopened <= 350 < whole
    assert found["kept"] == reopened, "the page below the pool jumps"
    assert found["words"] == [
        "Blocks 20021 to 29000: 8,980 free blocks",
        "Block 20020: free",
        "Blocks 421 to 19985: 19,565 free blocks",
        "Block 420: free",
    ]


async def test_cached_blocks_fold_where_they_would_crowd_out_the_active_ones(page: "playwright_api.Page") -> None:
    """In a pool of 29,000 cached blocks the 40 active ones are drawn as large as in a small pool."""
    found = await page.evaluate(
        """async () => {
            const { layOutPool } = await import("/live/pool_layout.js");
            const blocks = new Int32Array(29_001).fill(-1).fill(1, 10_000, 10_040);
            const layout = layOutPool(blocks, 700);
            const { x, y } = layout.rectangle(10_020);
            return { cell: layout.cell, height: layout.height, gaps: layout.bands.filter(({ isGap }) => isGap).length,
                     found: layout.blockAt(x + 1, y + 1), gap: layout.blockAt(5, layout.rectangle(5_000).y + 3) };
        }"""
    )
    assert found == {"cell": 20, "height": found["height"], "gaps": 2, "found": 10_020, "gap": 36}
    assert found["height"] < 200


async def test_zooming_by_button_key_wheel_and_fingers(page: "playwright_api.Page") -> None:
    expect = playwright_api.expect
    await expect(page.locator("#pool-sizes")).to_contain_text("tokens a block")
    grid = page.locator("#pool-grid")

    async def height() -> int:
        return int(await grid.evaluate("canvas => canvas.clientHeight"))

    fitting = await height()
    await page.click("#pool-larger")
    larger = await height()
    assert larger > fitting
    await page.click("#pool-smaller")
    assert await height() == fitting
    await grid.focus()
    await page.keyboard.press("+")
    assert await height() == larger
    await page.keyboard.press("0")
    assert await height() == fitting

    await grid.hover()
    await page.keyboard.down("Control")
    await page.mouse.wheel(0, -60)
    await page.keyboard.up("Control")
    await page.wait_for_function("height => document.getElementById('pool-grid').clientHeight === height", arg=larger)
    await page.click("#pool-fit")
    await grid.evaluate(
        """canvas => {
            for (const [type, distance] of [["touchstart", 100], ["touchmove", 140]]) {
                const touches = [0, distance].map((clientX, identifier) =>
                    new Touch({ identifier, target: canvas, clientX, clientY: 0 }));
                canvas.dispatchEvent(new TouchEvent(type, { touches, cancelable: true }));
            }
        }"""
    )
    assert await height() == larger

    await page.click("#pool-whole")
    await expect(page.locator("#pool-whole")).to_have_attribute("aria-pressed", "true")
    assert await height() == fitting  # a small pool is drawn whole in any case
    await grid.focus()
    await page.keyboard.press("w")
    await expect(page.locator("#pool-whole")).to_have_attribute("aria-pressed", "false")
