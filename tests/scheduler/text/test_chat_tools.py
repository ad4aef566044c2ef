"""Templates receive tools and calls as from transformers, and none of their texts becomes a control token."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler.core import InvalidRequest
from scheduler.text.chat import ChatRenderer
from scheduler.text.chat_messages import Chat, ChatMessage, ToolCall
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler import small_tokenizers

# In the manner of Qwen and Hermes, of Llama 3, and of Mistral.
HERMES = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
    {%- else %}<|im_start|>{{ message.role }}
{% if thought %}<think>{{ thought }}</think>{% endif %}{{ message.content }}
        {%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
        {%- endfor %}<|im_end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""
LLAMA3 = """
{%- for message in messages %}
    {%- if message.role == 'user' and loop.last and tools is not none %}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}<|eot_id|>
    {%- else %}<|start|>{{ message.role }}<|end|>{{ message.content | trim }}<|eot_id|>
    {%- endif %}
{%- endfor %}
"""
MISTRAL = """
{%- if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls is defined %}[TOOL_CALLS]
        {%- for call in m.tool_calls %}{{ call.function | tojson }} {{ call.id }}{% endfor %}
    {%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}
    {%- else %}{{ m.role }} {{ m.name or '' }} {{ m.content }}
    {%- endif %}
{%- endfor %}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says how it is in "Zürich" & <elsewhere>.',
        "parameters": {"type": "object", "properties": {"place": {"type": ["string", "null"]}}, "x": [1, 2.5, None]},
    },
}
CHAT = Chat(
    [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "How is it outside?", name="ada"),
        ChatMessage(
            "assistant", "", reasoning_content="Look.", tool_calls=(ToolCall("c1", "weather", '{"place": "Zürich"}'),)
        ),
        ChatMessage("tool", '{"sun": true}', tool_call_id="c1", name="weather"),
        ChatMessage("assistant", "  It is sunny  "),
    ],
    tools=(json.dumps(TOOL),),
)


def calling(arguments: str) -> ChatMessage:
    return ChatMessage("assistant", "", tool_calls=(ToolCall("1", "now", arguments),))


@asynccontextmanager
async def renderer(template: str, tokenizer: Tokenizer | None = None) -> AsyncIterator[ChatRenderer]:
    renderer = ChatRenderer(template, {}, tokens=() if tokenizer is None else tokenizer.control_tokens)
    try:
        yield renderer
    finally:
        await renderer.close()


def expected(template: str, chat: Chat, **options: Any) -> str:
    """Returns the text from transformers."""
    messages = []
    for message in chat.messages:
        fields = message.fields()
        if "tool_calls" in fields:
            fields["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
                for i, name, arguments in fields["tool_calls"]
            ]
        messages.append(fields)
    tools = [json.loads(tool) for tool in chat.tools] or None
    texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
    return texts[0]


TRAINING = """
{%- for message in messages %}{% set end = '|' %}{% set ns = namespace(n=0) %}
    {%- generation %}{% set end = '!' %}{% set ns.n = loop.index %}{{ message.content }}{{ end }}{% endgeneration %}
    {{- end }}{{ ns.n }}
{%- endfor %}
"""


@pytest.mark.parametrize("template", [HERMES, LLAMA3, MISTRAL, TRAINING])
async def test_templates_receive_what_transformers_gives_them(template: str) -> None:
    async with renderer(template) as tested:
        assert await tested.render(CHAT) == expected(template, CHAT, add_generation_prompt=True)
        bare = replace(CHAT, tools=())
        assert await tested.render(bare) == expected(template, bare, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("content", "calls", "shown"),
    [("", True, "Look."), ("I ask.", True, "I ask."), ("It is sunny.", False, "Look."), ("", False, "Look.")],
)
async def test_a_template_that_refuses_a_thought_beside_a_content_and_calls_gets_no_thought(
    content: str, calls: bool, shown: str
) -> None:
    """The template of gpt-oss is such a one."""
    refusing = (
        "{% set m = messages[0] %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}"
        "{% endif %}{{ m.thinking or m.content }}"
    )
    tool_calls = (ToolCall("c1", "weather", "{}"),) if calls else ()
    chat = Chat([ChatMessage("assistant", content, reasoning_content="Look.", tool_calls=tool_calls)])
    async with renderer(refusing) as tested:
        assert await tested.render(chat) == shown
    async with renderer("{{ messages[0].reasoning_content }}{{ messages[0].content }}") as tested:
        assert await tested.render(chat) == "Look." + content


@pytest.mark.parametrize("template", [HERMES, LLAMA3, MISTRAL])
@pytest.mark.parametrize("content", ["It is", "It is ", "  It is  ", "It is\n"])
async def test_the_last_message_can_be_continued(template: str, content: str) -> None:
    chat = Chat([*CHAT.messages[:4], ChatMessage("assistant", content)], CHAT.tools, continues_last=True)
    async with renderer(template) as tested:
        assert await tested.render(chat) == expected(template, chat, continue_final_message=True)


async def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    async with renderer("{{ messages[0].content }}") as tested:
        with pytest.raises(InvalidRequest, match="cannot be continued"):
            await tested.render(replace(CHAT, continues_last=True))


async def test_arguments_of_the_template_reach_it() -> None:
    async with renderer(HERMES) as tested:
        for value in (False, True):
            chat = replace(CHAT, arguments={"enable_thinking": json.dumps(value)})
            wanted = expected(HERMES, CHAT, add_generation_prompt=True, enable_thinking=value)
            assert await tested.render(chat) == wanted
        assert (await tested.render(CHAT)).endswith("<|im_start|>assistant")
        chat = replace(CHAT, arguments={"add_generation_prompt": "false"})
        assert await tested.render(chat) == expected(HERMES, CHAT, add_generation_prompt=False)


async def test_arguments_of_the_template_do_not_replace_the_chat() -> None:
    async with renderer("{{ messages | length }} {{ tools | length }}") as tested:
        assert await tested.render(replace(CHAT, arguments={"messages": "[]", "tools": "[]"})) == "5 1"


@pytest.mark.parametrize(
    ("chat", "path"),
    [
        (replace(CHAT, tools=("{}", "[1]")), "chat.tools[1]"),
        (replace(CHAT, tools=("{",)), "chat.tools[0]"),
        (replace(CHAT, tools=("[" * 100_000,)), "chat.tools[0]"),
        (replace(CHAT, tools=("9" * 10_000,)), "chat.tools[0]"),
        (replace(CHAT, arguments={"thinking": "yes"}), "chat.template_arguments[thinking]"),
        (Chat([calling("x")]), "chat.messages[0].tool_calls[0].arguments"),
        (Chat([calling("[]")]), "chat.messages[0].tool_calls[0].arguments"),
    ],
)
async def test_texts_that_are_not_json_are_refused_by_their_path(chat: Chat, path: str) -> None:
    async with renderer(HERMES) as tested:
        with pytest.raises(InvalidRequest) as caught:
            await tested.render(chat)
        assert list(caught.value.violations) == [path]
        assert await tested.render(CHAT) == expected(HERMES, CHAT, add_generation_prompt=True), "the next one is served"


async def test_deeply_nested_tools_are_refused_and_the_next_chat_is_rendered() -> None:
    async with renderer(HERMES) as tested:
        nested = '{"a":' * 900 + "1" + "}" * 900
        with pytest.raises(InvalidRequest):
            await tested.render(replace(CHAT, tools=(nested,)))
        assert await tested.render(CHAT) == expected(HERMES, CHAT, add_generation_prompt=True)


async def test_a_call_without_arguments_has_an_empty_object() -> None:
    async with renderer(HERMES) as tested:
        assert '{"name": "now", "arguments": {}}' in await tested.render(Chat([calling("")]))


def chatml() -> Tokenizer:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    return Tokenizer(tokenizer)


def full_of(text: str) -> Chat:
    """Returns a chat with a text in every place that clients write."""
    tool = {"type": "function", "function": {"name": text, "description": text, text: [text, {text: text}]}}
    call = ToolCall(text, text, json.dumps({text: [text]}))
    messages = [
        ChatMessage("user", "a", name=text),
        ChatMessage("assistant", "", reasoning_content=text, tool_calls=(call,)),
        ChatMessage("tool", text, tool_call_id=text, name=text),
    ]
    return Chat(messages, (json.dumps(tool),), {"thinking": json.dumps([text])})


@pytest.mark.parametrize("template", [HERMES, MISTRAL + "<|im_start|>{{ thinking }}{{ messages[1].thinking }}"])
async def test_no_text_of_a_tool_or_call_becomes_a_control_token(template: str) -> None:
    tokenizer = chatml()
    controls = {token.text: tokenizer._tokenizer.token_to_id(token.text) for token in tokenizer.control_tokens}
    async with renderer(template, tokenizer) as tested:
        counts = {}
        for text in ("harmless", *controls):
            ids = await tokenizer.encode_chat(await tested.render(full_of(text)))
            counts[text] = [token_id for token_id in ids if token_id in controls.values()]
            if text != "harmless":
                assert text in tokenizer._tokenizer.decode(ids, skip_special_tokens=False).replace("\\n", "\n")
    assert {tuple(ids) for ids in counts.values()} == {tuple(counts["harmless"])}
    assert counts["harmless"], "the template's own tokens are there"
    tokenizer.close()
