"""The chat page in a real Chromium, in front of a scheduler whose answers the test writes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import grpc
import pytest

from quire.v1 import generation_pb2 as pb
from tests.support.gateway import fake_scheduler
from tests.support.gateway.chat_page import answers, ask, opened
from tests.support.gateway.fake_scheduler import Answer, Failure, delta, finished, started
from tests.support.gateway.rig import Rig
from tests.support.live.chromium import browser, needs_chromium, playwright_api
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["browser"]

pytestmark = needs_chromium
HOSTILE = "<img src=x onerror='window.bad=1'></script><script>window.bad=1</script>&lt;b&gt; <b>bold</b>"


def roles(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


async def test_a_conversation(browser: playwright_api.Browser) -> None:
    async with Rig(live_page="http://127.0.0.1:8080") as rig, opened(browser, rig.server.address) as page:
        expect = playwright_api.expect
        await expect(page.locator("#state")).to_have_text("ready")
        await expect(page.locator("#model")).to_have_text("tiny")
        await expect(page.get_by_role("link", name="Live page")).to_have_attribute("href", "http://127.0.0.1:8080")
        await page.fill("#question", "one")
        await page.press("#question", "Shift+Enter")
        await page.keyboard.type("two")
        await page.press("#question", "Enter")
        assert await answers(page) == ["w0 w1 w2 "]
        await expect(page.locator(".usage")).to_have_text("3 prompt tokens, 1 of them cached · 3 generated")
        await page.fill("#question", "three")
        await page.get_by_role("button", name="Send").click()
        assert await answers(page) == ["w0 w1 w2 "] * 2
        assert roles(rig.fake.requests[0]) == [("user", "one\ntwo")]
        assert roles(rig.fake.requests[1]) == [("user", "one\ntwo"), ("assistant", "w0 w1 w2 "), ("user", "three")]
        await page.get_by_role("button", name="New chat").click()
        await ask(page, "four")
        assert await answers(page) == ["w0 w1 w2 "]
        assert roles(rig.fake.requests[2]) == [("user", "four")]


async def test_the_send_button_keeps_the_focus(browser: playwright_api.Browser) -> None:
    go_on = asyncio.Event()

    async def answer(request: pb.GenerateRequest) -> Answer:
        await go_on.wait()
        yield started()
        yield finished(0, 0)

    async with Rig() as rig, opened(browser, rig.server.address) as page:
        rig.fake.answer = answer
        await page.fill("#question", "hi")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await playwright_api.expect(page.get_by_role("button", name="Stop")).to_be_focused()
        go_on.set()
        await playwright_api.expect(page.get_by_role("button", name="Send")).to_be_focused()


@pytest.mark.parametrize("way", [{"isComposing": True}, {"keyCode": 229}])
async def test_an_enter_of_an_input_method_sends_nothing(
    browser: playwright_api.Browser, way: dict[str, object]
) -> None:
    """Browsers mark it in one of these ways."""
    press = "(box, way) => box.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, ...way}))"
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        await page.fill("#question", "日本")
        await page.locator("#question").evaluate(press, way)
        await playwright_api.expect(page.locator("#question")).to_have_value("日本")
        assert await page.locator("#turns li").count() == 0
        await page.press("#question", "Enter")
        assert await answers(page) == ["w0 w1 w2 "]


async def test_another_model_after_a_restart_answers(
    browser: playwright_api.Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        await playwright_api.expect(page.locator("#model")).to_have_text("tiny")
        await rig.fake.stop()
        monkeypatch.setattr(fake_scheduler, "MODEL", "larger")
        await rig.fake.start()
        await until(lambda: rig.schedulers.info is not None and rig.schedulers.info.model_name == "larger")
        await ask(page, "hi")
        assert await answers(page) == ["w0 w1 w2 "]
        await playwright_api.expect(page.locator("#model")).to_have_text("larger")


async def test_text_appears_while_it_arrives(browser: playwright_api.Browser) -> None:
    go_on = asyncio.Event()

    async def answer(request: pb.GenerateRequest) -> Answer:
        yield started()
        yield delta(0, "Grüße 🦊", 1)
        await go_on.wait()
        yield delta(0, " und 日本語", 2)
        yield finished(0, 2, pb.FINISH_REASON_LENGTH)

    async with Rig() as rig, opened(browser, rig.server.address) as page:
        rig.fake.answer = answer
        await ask(page, "hi")
        await playwright_api.expect(page.locator(".answer")).to_have_text("Grüße 🦊")
        await playwright_api.expect(page.locator("#state")).to_have_text("answering")
        go_on.set()
        assert await answers(page) == ["Grüße 🦊 und 日本語"]
        await playwright_api.expect(page.locator(".usage")).to_contain_text("ended by the limit of tokens")


async def test_thoughts_are_shown_above_the_answer(browser: playwright_api.Browser) -> None:
    """They appear while the model thinks, also if no answer follows, and fold when the answer begins."""
    texts = [{"reasoning_content": "Hm, <b>a</b> "}, {"reasoning_content": "< b."}, {"content": "Yes."}]
    chunks = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': text}]})}\n\n" for text in texts]
    expect = playwright_api.expect
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        thoughts = page.locator(".thoughts p")
        await page.route("**/v1/chat/completions", instead("".join(chunks[:2])))
        await ask(page, "hi")
        assert await answers(page) == [""]
        await expect(thoughts).to_be_visible()
        await expect(thoughts).to_have_text("Hm, <b>a</b> < b.")
        await page.unroute_all()
        await page.route("**/v1/chat/completions", instead("".join(chunks) + "data: [DONE]\n\n"))
        await page.get_by_role("button", name="Regenerate").click()
        assert await answers(page) == ["Yes."]
        await expect(thoughts).to_be_hidden()
        await page.get_by_text("Thoughts").click()
        await expect(thoughts).to_have_text("Hm, <b>a</b> < b.")
        await page.unroute_all()
        await ask(page, "Sure?")
        assert await answers(page) == ["Yes.", "w0 w1 w2 "]
        await expect(thoughts.last).to_be_hidden()
    assert roles(rig.fake.requests[0]) == [("user", "hi"), ("assistant", "Yes."), ("user", "Sure?")]


@pytest.mark.parametrize("way", ["button", "key", "new chat", "leave"])
async def test_stopping_ends_the_request(browser: playwright_api.Browser, way: str) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        yield started()
        yield delta(0, "so far", 1)
        await asyncio.sleep(600)

    async with Rig() as rig, opened(browser, rig.server.address) as page:
        rig.fake.answer = answer
        await ask(page, "hi")
        await playwright_api.expect(page.locator(".answer")).to_have_text("so far")
        assert rig.fake.cancelled == []
        if way == "button":
            await page.get_by_role("button", name="Stop").click()
        elif way == "key":
            await page.keyboard.press("Escape")
        elif way == "new chat":
            await page.get_by_role("button", name="New chat").click()
        else:
            await page.goto("about:blank")
        await until(lambda: rig.fake.cancelled == [1])
        if way in ("button", "key"):
            assert await answers(page) == ["so far"]
            await playwright_api.expect(page.locator(".usage")).to_have_text("stopped")
            rig.fake.answer = rig.fake.words
            await ask(page, "go on")
            assert await answers(page) == ["so far", "w0 w1 w2 "]
            assert roles(rig.fake.requests[1])[1] == ("assistant", "so far")


async def test_the_last_answer_can_be_regenerated_and_its_message_edited(browser: playwright_api.Browser) -> None:
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        for question in ("one", "two"):
            await ask(page, question)
            await answers(page)
        await playwright_api.expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        rig.fake.words_each = 2
        await page.get_by_role("button", name="Regenerate").click()
        await until(lambda: len(rig.fake.requests) == 3)
        assert await answers(page) == ["w0 w1 w2 ", "w0 w1 "]
        assert roles(rig.fake.requests[2]) == roles(rig.fake.requests[1])
        await playwright_api.expect(page.get_by_role("button", name="Regenerate")).to_be_focused()
        await page.get_by_role("button", name="Edit message").click()
        await playwright_api.expect(page.locator("#question")).to_have_value("two")
        await page.keyboard.type("2")
        await page.keyboard.press("Enter")
        await until(lambda: len(rig.fake.requests) == 4)
        assert await answers(page) == ["w0 w1 w2 ", "w0 w1 "]
        assert roles(rig.fake.requests[3])[-1] == ("user", "two2")


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_answer_stays_when_its_replacement_fails(browser: playwright_api.Browser, is_stopped: bool) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        if is_stopped:
            await asyncio.sleep(600)
        raise Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield

    async with Rig() as rig, opened(browser, rig.server.address) as page:
        await ask(page, "one")
        await answers(page)
        rig.fake.answer = answer
        await page.get_by_role("button", name="Regenerate").click()
        if is_stopped:
            await until(lambda: len(rig.fake.requests) == 2)
            await page.get_by_role("button", name="Stop").click()
        assert await answers(page) == ["w0 w1 w2 "]
        await playwright_api.expect(page.locator(".usage")).to_contain_text("3 generated")
        await playwright_api.expect(page.locator("li .error")).to_have_text("" if is_stopped else "the queue is full")
        rig.fake.answer = rig.fake.words
        await ask(page, "two")
        assert await answers(page) == ["w0 w1 w2 "] * 2
        assert [role for role, _ in roles(rig.fake.requests[-1])] == ["user", "assistant", "user"]


async def test_parameters_are_sent_and_remembered(browser: playwright_api.Browser) -> None:
    fields = {"System prompt": "Be brief.", "Temperature": "0.5", "Top p": "0.9", "Max tokens": "7", "Seed": "42"}
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        await ask(page, "hi")
        await answers(page)
        for label, value in fields.items():
            await page.get_by_label(label).fill(value)
        await page.reload()
        for label, value in fields.items():
            await playwright_api.expect(page.get_by_label(label)).to_have_value(value)
        await ask(page, "hi")
        await answers(page)
    plain, chosen = rig.fake.requests
    assert not any(map(plain.sampling.HasField, ("temperature", "top_p", "seed")))
    assert not plain.stopping.HasField("max_tokens")
    assert roles(chosen) == [("system", "Be brief."), ("user", "hi")]
    assert (chosen.sampling.temperature, round(chosen.sampling.top_p, 5)) == (0.5, 0.9)
    assert (chosen.stopping.max_tokens, chosen.sampling.seed) == (7, 42)


@pytest.mark.parametrize(
    ("label", "value", "words"),
    [("Temperature", "hot", "temperature: must be a number"), ("Seed", "9007199254740993", "seed")],
)
async def test_a_refused_parameter_is_shown_at_its_field(
    browser: playwright_api.Browser, label: str, value: str, words: str
) -> None:
    """A seed that JavaScript would round is refused as well, and not changed silently."""
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        await page.get_by_label(label).fill(value)
        await ask(page, "hi")
        await playwright_api.expect(page.get_by_role("alert")).to_contain_text(words)
        await playwright_api.expect(page.get_by_label(label)).to_have_attribute("aria-invalid", "true")
        await playwright_api.expect(page.get_by_label(label)).to_be_focused()
        await page.get_by_label(label).fill("1")
        await page.get_by_role("button", name="Regenerate").click()
        await playwright_api.expect(page.locator(".answer")).to_have_text("w0 w1 w2 ")
        await playwright_api.expect(page.get_by_label(label)).not_to_have_attribute("aria-invalid", "true")
        assert len(rig.fake.requests) == 1


async def test_a_message_without_an_answer_is_not_repeated(browser: playwright_api.Browser) -> None:
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        await page.get_by_label("Temperature").fill("-1e9999")
        await ask(page, "hi")
        await playwright_api.expect(page.get_by_role("alert")).to_contain_text("temperature")
        await page.get_by_label("Temperature").fill("")
        await ask(page, "hello")
        assert await answers(page) == ["", "w0 w1 w2 "]
    assert [roles(request) for request in rig.fake.requests] == [[("user", "hello")]]


async def test_a_key_is_asked_for_and_kept_for_this_tab(browser: playwright_api.Browser) -> None:
    async with Rig(key="right", own_key="right") as rig, opened(browser, rig.server.address) as page:
        expect = playwright_api.expect
        await expect(page.locator("#state")).to_have_text("needs a key")
        await expect(page.get_by_label("API key")).to_be_focused()
        await ask(page, "hi")
        for key, words in (("wrong", "does not accept this key"), ("right", "")):
            await page.get_by_label("API key").fill(key)
            await page.keyboard.press("Enter")
            if words:
                await expect(page.locator("#key-words")).to_contain_text(words)
        await expect(page.locator(".answer")).to_have_text("w0 w1 w2 ")  # the message was sent again
        await expect(page.get_by_label("API key")).to_be_hidden()
        await expect(page.locator("#model")).to_have_text("tiny")
        assert await page.evaluate("JSON.stringify(localStorage)") == "{}"
        await page.reload()
        await expect(page.locator("#state")).to_have_text("ready")


def instead(body: str) -> Callable[[playwright_api.Route], Awaitable[None]]:
    """Returns a handler that answers with these events."""

    async def fulfill(route: playwright_api.Route) -> None:
        await route.fulfill(body=body, content_type="text/event-stream")

    return fulfill


async def test_an_answer_that_breaks_off_is_an_error_beside_its_text(browser: playwright_api.Browser) -> None:
    cut = 'data: {"choices":[{"index":0,"delta":{"content":"so far"},"finish_reason":null}]}\n\n'
    failed = cut + 'data: {"error":{"message":"the pool is gone","param":null}}\n\n'
    async with Rig() as rig, opened(browser, rig.server.address) as page:
        for body, words in ((cut, "The answer broke off."), (failed, "the pool is gone")):
            await page.route("**/v1/chat/completions", instead(body))
            await ask(page, "hi")
            last = page.locator("#turns li").last
            await playwright_api.expect(last.get_by_role("alert")).to_have_text(words)
            await playwright_api.expect(last.locator(".answer")).to_have_text("so far")
        await page.unroute_all()
        await rig.server.stop()
        await page.get_by_role("button", name="Regenerate").click()
        await playwright_api.expect(page.locator("#turns li").last.get_by_role("alert")).not_to_have_text(words)
        await playwright_api.expect(page.locator("#state")).to_have_text("no connection")


async def test_hostile_text_stays_text(browser: playwright_api.Browser) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        yield started()
        for i, character in enumerate(HOSTILE):
            yield delta(0, character, i)
        yield finished(0, len(HOSTILE))

    async with Rig() as rig, opened(browser, rig.server.address) as page:
        rig.fake.answer = answer
        await ask(page, HOSTILE)
        assert await answers(page) == [HOSTILE]
        assert await page.locator(".question").text_content() == HOSTILE
        assert await page.locator("#turns :is(img, script, b)").count() == 0
        assert await page.evaluate("window.bad") is None


async def test_inline_scripts_are_blocked(browser: playwright_api.Browser) -> None:
    async with Rig() as rig:
        page = await browser.new_page()
        await page.goto(f"http://{rig.server.address}/")
        blocked = await page.evaluate(
            """async () => {
                const blocked = [];
                addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
                const script = document.createElement("script");
                script.textContent = "window.bad = 1";
                document.body.append(script);
                const div = document.body.appendChild(document.createElement("div"));
                div.innerHTML = "<img src='/nothing.png' onerror='window.bad = 1'><p style='color: red'>";
                await fetch("http://127.0.0.2:9/").catch(() => {});
                await new Promise((resolve) => setTimeout(resolve, 500));
                return [...blocked.sort(), window.bad ?? "nothing ran"];
            }"""
        )
        await page.close()
    assert blocked == ["connect-src", "script-src-attr", "script-src-elem", "style-src-attr", "nothing ran"]
