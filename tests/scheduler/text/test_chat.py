"""Chat templates get what they expect, and hostile ones are contained."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.checksums import TOOL_TEMPLATE
from scheduler.core import InvalidRequest, QueueFull, Unavailable
from scheduler.text import turns, workers
from scheduler.text.chat import ChatLimits, ChatRenderer, load_template
from scheduler.text.chat_messages import Chat, ChatMessage
from scheduler.text.checkpoint import Checkpoint
from tests.support.scheduler.small_tokenizers import CHAT_TEMPLATE

CHAT = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


async def render(template: str, messages: list[ChatMessage] = CHAT, **limits: float) -> str:
    renderer = ChatRenderer(template, VARIABLES, ChatLimits(**limits))  # type: ignore[arg-type]
    try:
        return await renderer.render(Chat(messages))
    finally:
        await renderer.close()


async def refusal(template: str, messages: list[ChatMessage] = CHAT, **limits: float) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await render(template, messages, **limits)
    assert list(caught.value.violations) == ["chat"]
    return caught.value.violations["chat"]


async def test_template_renders_a_chat() -> None:
    assert await render(CHAT_TEMPLATE) == "<s><|system|>Be brief.<|user|>Hello<|assistant|>"


async def test_templates_get_functions_and_filters_that_they_expect() -> None:
    template = """
    {%- set ns = namespace(count=0) %}
    {%- if tools is none and documents is none %}none {% endif %}
    {%- for message in messages %}
        {%- if loop.first %}{% continue %}{% endif %}
        {%- set ns.count = ns.count + 1 %}
        {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- endfor %}
    {{- {"b": "<é>", "a": [1]} | tojson }}{{ {"x": 1} | tojson(indent=2) }}
    {{- strftime_now("%Y") | length }}{{ ns.count }}
    """
    chat = [*CHAT, ChatMessage("user", " 你好\n")]
    assert (await render(template, chat)).strip() == 'none Hello你好{"b": "<é>", "a": [1]}{\n  "x": 1\n}42'


async def test_rendered_texts_are_not_json_that_the_event_loop_would_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.text.workers.json.loads", None)
    text = "".join(map(chr, range(0x1000))) + "🦊\u2028"
    assert await render("{{ messages[0]['content'] }}", [ChatMessage("user", text)]) == text
    assert "bad \x01" in await refusal("{{ raise_exception('bad \x01') }}")


async def test_the_messages_of_large_chats_are_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of 2 MiB takes 13 ms."""
    framed, threads = workers._framed, []

    def recorded(message: dict[str, Any]) -> bytes:
        threads.append(threading.current_thread())
        return framed(message)

    monkeypatch.setattr(workers, "_framed", recorded)
    for text in ("é🦊", "é🦊" * workers.LARGE):
        threads.clear()
        assert await render("{{ messages[0]['content'] }}", [ChatMessage("user", text)]) == text
        chat, settings = threads
        assert settings is threading.main_thread()
        assert (chat is threading.main_thread()) == (len(text) < workers.LARGE)


async def test_raise_exception_reaches_the_client() -> None:
    assert "roles must alternate" in await refusal("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% for message in messages %}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute }}",
        "{{ [0] * 10**11 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
async def test_hostile_templates_are_refused(template: str) -> None:
    assert await refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 7 ** (9 ** 9) }}",  # one instruction of the interpreter, which no exception can end
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
async def test_endless_templates_are_stopped(template: str) -> None:
    assert "ran for more than" in await refusal(template, max_render_s=0.2)


async def test_chat_after_an_endless_one_is_rendered() -> None:
    # It depends on the messages, because the compiler would compute a constant for every chat.
    endless_power = "{{ 7 ** (9 ** (messages | length + 8)) }}"
    template = "{% if messages[0].content == 'loop' %}" + endless_power + "{% endif %}{{ messages[0].content }}"
    renderer = ChatRenderer(template, {}, ChatLimits(max_render_s=0.2))
    endless = asyncio.create_task(renderer.render(Chat([ChatMessage("user", "loop")])))
    next_chat = asyncio.create_task(renderer.render(Chat([ChatMessage("user", "a")])))
    assert await next_chat == "a"
    with pytest.raises(InvalidRequest):
        await endless
    await renderer.close()


async def test_a_tenant_with_slow_chats_leaves_a_process_to_others() -> None:
    endless_power = "{{ 7 ** (9 ** (messages | length + 8)) }}"
    template = "{% if messages[0].content == 'loop' %}" + endless_power + "{% endif %}{{ messages[0].content }}"
    renderer = ChatRenderer(template, {}, ChatLimits(max_render_s=1000))
    slow = [asyncio.create_task(renderer.render(Chat([ChatMessage("user", "loop")]), tenant="slow")) for _ in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await renderer.render(Chat([ChatMessage("user", "a")]), tenant="other") == "a"
    await renderer.close()
    for outcome in await asyncio.gather(*slow, return_exceptions=True):
        assert isinstance(outcome, Unavailable)


async def test_length_of_the_text_is_limited() -> None:
    assert len(await render("{{ 'x' * 1000 }}", max_text_bytes=1000)) == 1000
    assert "more than 1000 bytes" in await refusal("{{ 'é' * 501 }}", max_text_bytes=1000)
    looping = "{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}"
    assert "more than 1000 bytes" in await refusal(looping, max_text_bytes=1000)


async def test_memory_is_limited() -> None:
    large = "{{ ('x' * (3 * 10**8)) | length }}"
    assert await render(large) == "300000000"
    assert "MemoryError" in await refusal(large, max_memory_bytes=2**28)


async def test_unusual_text_is_unchanged() -> None:
    odd = "\x00\x7f\u2028{{ 1 }}{% raw %}\U0010ffff</s>"
    assert await render("{{ messages[0].content }}", [ChatMessage("user", odd)]) == odd


async def test_large_chat_is_rendered() -> None:
    chat = [ChatMessage("user", "x" * 2000)] * 1000
    assert len(await render("{% for m in messages %}{{ m.content }}{% endfor %}", chat)) == 2_000_000


async def test_waiting_chats_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_PENDING_CHARACTERS", 200)
    renderer = ChatRenderer("{{ messages[0].content }}", {})
    tasks = [asyncio.create_task(renderer.render(Chat([ChatMessage("user", "x" * 10)]))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await renderer.render(Chat([ChatMessage("user", "x" * 10)]))
    assert await asyncio.gather(*tasks) == ["x" * 10] * 2
    assert await renderer.render(Chat([ChatMessage("user", "y" * 300)])) == "y" * 300
    await renderer.close()


async def test_cancelled_callers_do_not_affect_others() -> None:
    renderer = ChatRenderer("{{ messages[0].content }}", {})
    await renderer.start()
    for i in range(20):
        cancelled = asyncio.create_task(renderer.render(Chat([ChatMessage("user", f"cancelled {i}")])))
        for _ in range(i % 5):
            await asyncio.sleep(0)
        cancelled.cancel()
        assert await renderer.render(Chat([ChatMessage("user", f"waiting {i}")])) == f"waiting {i}"
    await renderer.close()


async def test_a_process_that_was_killed_while_it_was_idle_costs_no_chat() -> None:
    renderer = ChatRenderer("{{ messages[0].content }}", {})
    await renderer.start()
    chat = Chat([ChatMessage("user", "hello")])
    try:
        assert await renderer.render(chat) == "hello"
        for child in psutil.Process().children(recursive=True):
            if "chat_worker" in child.cmdline():
                child.kill()
                child.wait(60)
        assert await renderer.render(chat) == "hello"
    finally:
        await renderer.close()


@pytest.mark.parametrize("has_started", [False, True])
async def test_close_does_not_wait_for_an_endless_template(has_started: bool) -> None:
    renderer = ChatRenderer("{{ 7 ** (9 ** 9) }}", {}, ChatLimits(max_render_s=1000))
    tasks = [asyncio.create_task(renderer.render(Chat(CHAT))) for _ in range(2)]
    await asyncio.sleep(0.3 if has_started else 0)
    await renderer.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, Unavailable)


def test_templates_are_found_in_files_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint, config = Checkpoint(tmp_path), tmp_path / "tokenizer_config.json"
    assert load_template(checkpoint) is None
    config.write_text(json.dumps({"chat_template": "one"}))
    assert load_template(checkpoint) == "one"
    named = [{"name": "rag", "template": "texts"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_template(checkpoint) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_template(checkpoint) == "three"


@pytest.mark.parametrize("is_in_files", [False, True])
async def test_the_template_named_tool_use_renders_chats_with_tools(is_in_files: bool, tmp_path: Path) -> None:
    """Transformers chooses likewise. Each template renders as if it were alone, white space included."""
    templates = {
        "default": "\n {{ messages[0].content }}\n  \n",
        "tool_use": "\n{{ tools|length }} tools\n{% if 1 %}!{% endif %}\n",
    }
    named = [{"name": name, "template": template} for name, template in templates.items()]
    if is_in_files:
        (tmp_path / TOOL_TEMPLATE).parent.mkdir()
        (tmp_path / TOOL_TEMPLATE).write_text(templates["tool_use"])
        (tmp_path / "chat_template.jinja").write_text(templates["default"])
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chats = {"default": Chat(CHAT), "tool_use": Chat(CHAT, tools=('{"name": "f"}',))}
    for template in (load_template(Checkpoint(tmp_path)), None):
        rendered = []
        for name, chat in chats.items():
            renderer = ChatRenderer(template or templates[name], {})
            rendered.append(await renderer.render(chat))
            await renderer.close()
        assert rendered == [f"\n {CHAT[0].content}\n  ", "\n1 tools\n!"]
