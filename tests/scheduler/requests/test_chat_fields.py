"""All texts of a chat are checked, and limited together."""

from typing import Any

import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.requests.chat_fields import read_chat
from scheduler.requests.limits import RequestLimits
from scheduler.requests.request_fields import RequestFields
from scheduler.servers.generation_server import read_fields
from scheduler.text.chat_messages import Chat, ChatMessage, ToolCall

LIMITS = RequestLimits(max_prompt_bytes=100, max_num_tools=3, template_arguments=frozenset({"thinking"}))
CALL = pb.ToolCall(id="c1", name="f", arguments="{}")


def read(**chat: Any) -> tuple[Chat | None, RequestFields]:
    chat.setdefault("messages", [pb.ChatMessage(role="user", content="a")])
    fields = read_fields(pb.GenerateRequest(chat=pb.ChatPrompt(**chat)))
    return read_chat(fields, LIMITS), fields


def test_every_field_reaches_the_template() -> None:
    message = pb.ChatMessage(
        role="assistant", content="b", tool_calls=[CALL], tool_call_id="c0", name="n", reasoning_content="r"
    )
    chat, fields = read(
        messages=[message], tools=["{}"], template_arguments={"thinking": "true"}, continue_final_message=True
    )
    assert not fields.violations
    expected = ChatMessage("assistant", "b", "r", "n", "c0", (ToolCall("c1", "f", "{}"),))
    assert chat == Chat([expected], ["{}"], {"thinking": "true"}, continues_last=True)


@pytest.mark.parametrize(
    ("chat", "path"),
    [
        ({"messages": []}, "chat.messages"),
        ({"messages": [pb.ChatMessage(content="a")]}, "chat.messages[0].role"),
        ({"messages": [pb.ChatMessage(role="user", name="x" * 101)]}, "chat.messages[0].name"),
        ({"messages": [pb.ChatMessage(role="user", tool_call_id="x" * 101)]}, "chat.messages[0].tool_call_id"),
        ({"messages": [pb.ChatMessage(role="user", reasoning_content="é" * 51)]}, "chat.messages[0].reasoning_content"),
        (
            {"messages": [pb.ChatMessage(role="assistant", tool_calls=[CALL, pb.ToolCall(id="c2")])]},
            "chat.messages[0].tool_calls[1].name",
        ),
        (
            {"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments="x" * 101)])]},
            "chat.messages[0].tool_calls[0].arguments",
        ),
        ({"tools": ["{}"] * 4}, "chat.tools"),
        ({"tools": ["{}", ""]}, "chat.tools[1]"),
        ({"tools": ["x" * 60, "x" * 60]}, "chat.tools[1]"),
        ({"template_arguments": {"thinking": "x" * 101}}, "chat.template_arguments[thinking]"),
        ({"template_arguments": {"chat_template": '"x"'}}, "chat.template_arguments[chat_template]"),
        ({"template_arguments": {"messages": "[]"}}, "chat.template_arguments[messages]"),
    ],
)
def test_bad_fields_are_named(chat: dict[str, Any], path: str) -> None:
    _, fields = read(**chat)
    assert list(fields.violations) == [path]


def test_the_refusal_of_an_argument_names_those_that_are_allowed() -> None:
    _, fields = read(template_arguments={"x" * 1000: "1"})
    assert list(fields.violations.values()) == ["is not allowed here; allowed: thinking"]
    assert len(next(iter(fields.violations))) < 80
