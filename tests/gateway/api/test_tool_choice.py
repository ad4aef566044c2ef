"""Fields about tools become a `ToolUse`."""

from typing import Any

import pytest

from gateway.api.anthropic import parse_message
from gateway.api.chat import parse_chat
from gateway.api.responses import parse_response
from gateway.tools.tool_use import Tool, ToolUse

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
F, G = Tool("f", SCHEMA), Tool("g")
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
RESPONSE_TOOLS = [{"type": "function", "name": "f", "parameters": SCHEMA}, {"type": "function", "name": "g"}]
MESSAGE_TOOLS = [{"name": "f", "input_schema": SCHEMA}, {"name": "g"}]
USER = [{"role": "user", "content": "hi"}]
BOTH = (F, G)


def chat(**fields: Any) -> ToolUse | None:
    return parse_chat({"messages": USER, "tools": CHAT_TOOLS} | fields).tools


def response(**fields: Any) -> ToolUse | None:
    return parse_response({"input": "hi", "tools": RESPONSE_TOOLS} | fields).tools


def message(**fields: Any) -> ToolUse | None:
    return parse_message({"messages": USER, "max_tokens": 5, "tools": MESSAGE_TOOLS} | fields).tools


@pytest.mark.parametrize("parse", [chat, response])
def test_openai(parse: Any) -> None:
    assert parse() == parse(tool_choice="auto") == ToolUse(BOTH)
    assert parse(tools=None) is None
    assert parse(tool_choice="none") == ToolUse(BOTH, is_read=False)
    assert parse(tool_choice="required") == ToolUse(BOTH, is_forced=True)
    assert parse(parallel_tool_calls=False) == ToolUse(BOTH, allows_several=False)


def test_a_named_tool() -> None:
    named = ToolUse(BOTH, is_forced=True, name="g", allows_several=False)
    assert chat(tool_choice={"type": "function", "function": {"name": "g"}}) == named
    assert response(tool_choice={"type": "function", "name": "g"}) == named
    assert message(tool_choice={"type": "tool", "name": "g"}) == named
    assert named.callable_tools == (G,)


def test_strict() -> None:
    strict = ToolUse((Tool("f", SCHEMA, is_strict=True),))
    function = {"name": "f", "parameters": SCHEMA, "strict": True}
    assert chat(tools=[{"type": "function", "function": function}]) == strict
    assert response(tools=[{"type": "function"} | function]) == strict
    assert strict.needs_grammar


def test_anthropic() -> None:
    assert message() == message(tool_choice={"type": "auto"}) == ToolUse(BOTH)
    assert message(tools=None) is None
    assert message(tool_choice={"type": "none"}) == ToolUse(BOTH, is_read=False)
    assert message(tool_choice={"type": "any"}) == ToolUse(BOTH, is_forced=True)
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert message(tool_choice=one) == ToolUse(BOTH, is_forced=True, allows_several=False)
