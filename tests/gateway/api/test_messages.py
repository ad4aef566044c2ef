"""Messages and tools of a chat."""

import json
from typing import Any

import pytest

from gateway.api.chat import parse_chat
from gateway.api.errors import ApiError
from quire.v1 import generation_pb2 as pb

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}}}


def parsed(messages: list[Any], **fields: Any) -> pb.ChatPrompt:
    (request,) = parse_chat({"messages": messages, **fields}).requests
    return request.chat


def refused(messages: list[Any], **fields: Any) -> str | None:
    with pytest.raises(ApiError) as raised:
        parsed(messages, **fields)
    return raised.value.param


def test_roles_and_contents() -> None:
    chat = parsed(
        [
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": "c", "reasoning_content": "r"},
        ]
    )
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "s"),
        ("system", "d"),
        ("user", "a\nb"),
        ("assistant", "c"),
    ]
    assert chat.messages[2].name == "Ann"
    assert chat.messages[3].reasoning_content == "r"
    assert not chat.messages[0].HasField("name")


def test_what_helpers_of_the_client_add_is_ignored() -> None:
    function = CALL["function"]
    call = CALL | {"function": {**function, "parsed_arguments": {"x": 1}}}  # type: ignore[dict-item]
    message = {"role": "assistant", "content": "c", "tool_calls": [CALL]}
    assert parsed([USER, message | {"parsed": {"y": 2}, "tool_calls": [call]}]) == parsed([USER, message])
    assert refused([USER | {"parsed": {"y": 2}}]) == "messages[0].parsed"


def test_calls_and_their_results() -> None:
    chat = parsed(
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
    )
    (call,) = chat.messages[1].tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "f", '{"x": 1}')
    assert (chat.messages[2].tool_call_id, chat.messages[2].content) == ("c1", "42")


def test_a_refusal_of_another_server_is_what_the_assistant_said() -> None:
    refusal = {"type": "refusal", "refusal": "no"}
    for answer in ({"refusal": "no"}, {"content": None, "refusal": "no"}, {"content": [refusal]}):
        assert parsed([USER, {"role": "assistant", **answer}]).messages[1].content == "no"
    assert parsed([USER, {"role": "assistant", "content": "c", "refusal": "no"}]).messages[1].content == "c"
    assert refused([{"role": "user", "content": [refusal]}]) == "messages[0].content[0].type"
    assert refused([{"role": "user", "content": "c", "refusal": "no"}]) == "messages[0].refusal"
    assert refused([{"role": "assistant", "refusal": 5}]) == "messages[0].refusal"


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[]", "null", " ", '{"x": NaN}', r'{"x": "\ud83d"}', "[" * 9999])
def test_arguments_that_are_no_json_object_can_be_sent_back(arguments: str) -> None:
    """A call that broke off stays in the conversation, and every later request has it."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = parsed([USER, {"role": "assistant", "tool_calls": [call]}])
    assert json.loads(chat.messages[1].tool_calls[0].arguments) == {"invalid_json": arguments}


def test_an_answer_of_this_api_can_be_sent_back_as_it_is() -> None:
    answer = {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "function_call": None}
    assert parsed([USER, answer]).messages[1] == pb.ChatMessage(role="assistant", content="c")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "cat", "content": ""}, "messages[0].role"),
        ({"role": ["user"], "content": ""}, "messages[0].role"),
        ({"role": "function", "content": ""}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "user", "content": "", "tool_call_id": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "", "nope": 1}, "messages[0].nope"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "x"}]}, "messages[0].tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "", "name": 5}, "messages[0].name"),
    ],
)
def test_bad_messages_are_named(message: Any, param: str) -> None:
    assert refused([message]) == param


def test_tools_reach_the_template_as_they_are() -> None:
    chat = parsed([USER], tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    assert [json.loads(tool) for tool in chat.tools] == [TOOL]
    assert parsed([USER], tools=[TOOL], tool_choice="none").tools == chat.tools
    assert list(parsed([USER], tools=[TOOL]).tools) == list(chat.tools)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOL}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": 5}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "x": 1}}, "tool_choice.x"),
        ({"tools": [TOOL, TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": ["auto"]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_bad_tools_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused([USER], **fields) == param
