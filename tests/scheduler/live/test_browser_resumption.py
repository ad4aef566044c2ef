"""The prompt box continues its stream in a real Chromium when the scheduler dies."""

import signal

import pytest

from tests.support.e2e.stack import Stack
from tests.support.e2e.waiting import until
from tests.support.live.chromium import browser, endlessly, needs_chromium, playwright_api, stack

__all__ = ["browser", "stack"]

pytestmark = needs_chromium


async def generate(page: "playwright_api.Page", num_tokens: int) -> None:
    await page.fill("#prompt-text", "Once upon a time")
    await page.fill("[data-field='sampling.temperature']", "0")
    await page.fill("[data-field='sampling.n']", "2")
    await page.fill("[data-field='stopping.max_tokens']", str(num_tokens))
    await page.click("#prompt-send")


@pytest.mark.exhaustive
async def test_the_prompt_box_continues_after_a_killed_scheduler(
    stack: Stack, browser: "playwright_api.Browser"
) -> None:
    expect = playwright_api.expect
    stack.show_log()
    page = await browser.new_page()
    await page.goto(f"http://{stack.http}/")
    await page.route("**/live/completions", endlessly)
    output, status = page.locator("#prompt-output p"), page.locator("#prompt-status")
    await generate(page, 900)
    await expect(status).to_contain_text("done: ")
    expected, words = await output.all_text_contents(), await status.text_content()

    sent: list[dict[str, object]] = []
    page.on("request", lambda request: "completions" in request.url and sent.append(request.post_data_json))
    await generate(page, 900)
    await expect(output.first).to_contain_text(expected[0][:60])
    killed = stack.send("scheduler", signal.SIGKILL)
    await expect(status).to_contain_text("the stream broke off")
    await until(lambda: stack.pid("scheduler") not in (None, killed))
    await expect(status).to_contain_text("done: ")
    assert (await output.all_text_contents(), await status.text_content()) == (expected, words)
    assert len(sent) > 1
    assert "resume" in sent[-1]


async def test_the_prompt_box_follows_the_rules_of_resumption(stack: Stack, browser: "playwright_api.Browser") -> None:
    """Breaks before and after the first message, a full queue, a cut line, and a server that cannot continue."""
    stack.show_log()
    page = await browser.new_page()
    await page.goto(f"http://{stack.http}/")
    found = await page.evaluate(
        """async () => {
            const { completion } = await import("/live/resumption.js");
            const line = (message) => JSON.stringify(message) + "\\n";
            const started = (continuation) => line({ started: { request_id: "r", continuation } });
            const delta = (text, ids, last) => line({ delta: { index: 0, text, token_ids: ids, last } });
            const finished = line({ finished: { index: 0 } });
            const error = (code, message) => ({ error: { code, message, violations: [] } });
            const refusal = (status, code) => new Response(JSON.stringify(error(code, code)), { status });
            async function run(answers) {
                const [bodies, events] = [[], []];
                window.fetch = async (url, { body }) => {
                    bodies.push(JSON.parse(body));
                    const answer = answers.shift();
                    if (answer instanceof Response) return answer;
                    if (!answer) throw new TypeError("lost");
                    return new Response(answer);
                };
                const signal = new AbortController().signal;
                for await (const event of completion({ text: "p" }, signal, () => events.push("break"))) {
                    events.push(Object.keys(event)[0] + (event.delta?.text ?? event.error?.code ?? ""));
                }
                return { resumes: bodies.map((body) => body.resume ?? null), events };
            }
            const broken = line(error("UNAVAILABLE", "gone"));
            return {
                whole: await run([
                    null, refusal(503, "UNAVAILABLE"), started("c") + broken, refusal(429, "RESOURCE_EXHAUSTED"),
                    started("c") + delta("a", [1, 2], false) + '{"del',
                    started("d") + delta("b", [3], true) + broken, started("d") + finished,
                ]),
                full: await run([refusal(429, "RESOURCE_EXHAUSTED")]),
                failed: await run([started("c") + line(error("INTERNAL", "bug"))]),
                old: await run([started(undefined) + broken]),
                older: await run([started("c") + broken, started(undefined) + delta("a", [1], false) + finished]),
                one: (await run(Array(30).fill(started("c") + delta("a", [1], false) + broken))).resumes.length,
                two: (await run([
                    ...Array(24).fill(started("c") + delta("a", [1], false) + delta("b", [2], false) + broken),
                    started("c") + finished,
                ])).resumes.length,
            };
        }"""
    )
    await page.close()
    whole = found.pop("whole")
    breaks = ["break"] * 2
    assert whole["events"] == [*breaks, "started", *breaks, "deltaa", "break", "deltab", "break", "finished"]
    resumed = {"index": 0, "token_ids": [1, 2], "has_last": False, "finished": False}
    last = resumed | {"token_ids": [1, 2, 3], "has_last": True}
    nothing, *rest = [{"continuation": "c", "sequences": list(each)} for each in ([], [resumed], [last])]
    assert whole["resumes"] == [None, None, None, nothing, nothing, *rest]
    assert found == {
        "full": {"resumes": [None], "events": ["errorRESOURCE_EXHAUSTED"]},
        "failed": {"resumes": [None], "events": ["started", "errorINTERNAL"]},
        "old": {"resumes": [None], "events": ["started", "errorUNAVAILABLE"]},
        "older": {"resumes": [None, nothing], "events": ["started", "break", "errorINTERNAL"]},
        "one": 21,
        "two": 25,
    }
