"""Fields about tools become a `ToolUse`."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.api.anthropic import parse_message
from gateway.api.chat import parse_chat
from gateway.api.errors import ApiError
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
G_NAMED = {"type": "function", "function": {"name": "g"}}


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
    named = ToolUse(BOTH, is_forced=True, allowed=frozenset({"g"}), allows_several=False)
    assert chat(tool_choice={"type": "function", "function": {"name": "g"}}) == named
    assert response(tool_choice={"type": "function", "name": "g"}) == named
    assert message(tool_choice={"type": "tool", "name": "g"}) == named
    assert named.callable_tools == (G,)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(mode: str) -> None:
    one = ToolUse(BOTH, is_forced=mode == "required", allowed=frozenset({"g"}))
    both = ToolUse(BOTH, is_forced=mode == "required", allowed=frozenset({"f", "g"}))
    nested, plain = [{"type": "function", "function": {"name": each}} for each in "gf"], RESPONSE_TOOLS
    for num_tools, use in ((1, one), (2, both)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested[:num_tools]}}
        assert chat(tool_choice=choice) == use
        tools = [{"type": "function", "name": tool["name"]} for tool in plain[::-1][:num_tools]]
        assert response(tool_choice={"type": "allowed_tools", "mode": mode, "tools": tools}) == use
        assert chat(tool_choice=choice, parallel_tool_calls=False) == replace(use, allows_several=False)
    assert one.names == {"g"}
    assert one.needs_grammar
    assert both.needs_grammar is (mode == "required"), "nothing is excluded"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"allowed_tools": {"mode": "auto", "tools": [G_NAMED]}, "mode": "auto"}, "mode"),
        ({"allowed_tools": {"tools": [G_NAMED]}}, "allowed_tools.mode"),
        ({"allowed_tools": {"mode": "none", "tools": [G_NAMED]}}, "allowed_tools.mode"),
        ({"allowed_tools": {"mode": ["auto"], "tools": [G_NAMED]}}, "allowed_tools.mode"),
        ({"allowed_tools": {"mode": "auto"}}, "allowed_tools.tools"),
        ({"allowed_tools": {"mode": "auto", "tools": []}}, "allowed_tools.tools"),
        ({"allowed_tools": {"mode": "auto", "tools": G_NAMED}}, "allowed_tools.tools"),
        ({"allowed_tools": {"mode": "auto", "tools": [G_NAMED] * 129}}, "allowed_tools.tools"),
        ({"allowed_tools": {"mode": "auto", "tools": [G_NAMED], "x": 1}}, "allowed_tools.x"),
        ({"allowed_tools": {"mode": "auto", "tools": [5]}}, "allowed_tools.tools[0]"),
        ({"allowed_tools": {"mode": "auto", "tools": [G_NAMED, {"type": "mcp"}]}}, "allowed_tools.tools[1].type"),
        ({"allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}}, "allowed_tools.tools[0].name"),
        (
            {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": 5}]}},
            "allowed_tools.tools[0].function",
        ),
        (
            {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "h"}}]}},
            "allowed_tools.tools[0].function.name",
        ),
        ({"allowed_tools": 5}, "allowed_tools"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "h"}]}, "tools[0].name"),
        ({"mode": "auto", "tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
        ({}, "mode"),
    ],
)
@pytest.mark.parametrize("parse", [chat, response])
def test_bad_allowed_tools_are_named(parse: Any, choice: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(tool_choice={"type": "allowed_tools"} | choice)
    assert raised.value.param == f"tool_choice.{param}"


@pytest.mark.parametrize("parse", [chat, response])
def test_allowed_tools_need_tools(parse: Any) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    with pytest.raises(ApiError) as raised:
        parse(tools=None, tool_choice=choice)
    assert raised.value.param == "tool_choice.tools[0].name"


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
