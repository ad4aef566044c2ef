"""The messages and the tools of a chat, as `quire.v1.ChatPrompt`."""

import json
from collections.abc import Iterator
from typing import Any

from gateway.api.fields import Fields, shown
from gateway.api.json_values import arguments_of
from gateway.api.tool_choice import MAX_TOOLS, chat_tool_use
from gateway.tools.tool_use import Tool, ToolUse
from quire.v1 import generation_pb2 as pb

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 1024
MAX_TEMPLATE_ARGUMENTS = 64
"""Most variables of the chat template; a scheduler allows only those that its operator has named."""

TEXT_PARTS = ("text", "input_text", "output_text")
ASSISTANT_PARTS = (*TEXT_PARTS, "refusal")
CACHE_CONTROL: dict[str, tuple[Any, ...]] = {
    "cache_control": tuple(
        {"type": "ephemeral"} | ttl | scope
        for scope in ({}, {"scope": "global"})
        for ttl in ({}, {"ttl": "5m"}, {"ttl": "1h"})
    )
}
_NEUTRAL_IN_PARTS: dict[str, tuple[Any, ...]] = {"annotations": ([],)} | CACHE_CONTROL

_KNOWN = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning", "parsed", "refusal"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
"""The fields of each role. `parsed` repeats the content: helpers of OpenAI's client add it, and it is ignored."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}
"""Fields that an answer of this API has, and that clients send back with it."""


def add_messages(fields: Fields, chat: pb.ChatPrompt) -> None:
    """Adds the messages of the field `messages`."""
    for message in each_message(fields):
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            message.add_problem("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
            continue
        message.check_names(_KNOWN[role], _NEUTRAL)
        _add_message(message, role, chat.messages.add())


def each_message(fields: Fields) -> Iterator[Fields]:
    """Yields the objects of the field `messages`, which must have at least one."""
    messages = fields.few_items("messages", MAX_MESSAGES)
    if not messages:
        fields.add_problem("messages", "must have at least one message")
    yield from fields.objects("messages", messages)


def _add_message(message: Fields, role: str, added: pb.ChatMessage) -> None:
    added.role = "system" if role == "developer" else role  # few templates know developers; OpenAI treats them alike
    calls = message.items("tool_calls") if role == "assistant" else []
    if "content" in message:
        parts = ASSISTANT_PARTS if role == "assistant" else TEXT_PARTS
        added.content = message.joined_text("content", parts, _NEUTRAL_IN_PARTS)
    elif role == "assistant" and "refusal" in message:  # another server's answer, which had no content
        added.content = message.text("refusal") or ""
    elif role != "assistant" or not (calls or "reasoning_content" in message or "reasoning" in message):
        message.add_problem("content", "must be given")
    for call in message.objects("tool_calls", calls):
        _add_call(call, added.tool_calls.add())
    if role == "tool":
        if "tool_call_id" not in message:
            message.add_problem("tool_call_id", "must be given: it names the call that the message answers")
        added.tool_call_id = message.text("tool_call_id") or ""
    if (name := message.text("name")) is not None:
        added.name = name
    for key in ("reasoning_content", "reasoning"):
        if role == "assistant" and (thought := message.text(key)) is not None:
            added.reasoning_content = thought


def _add_call(call: Fields, added: pb.ToolCall) -> None:
    call.check_names({"id", "type", "function", "index"})
    if call.get("type") not in (None, "function"):
        call.add_problem("type", f'must be "function", not {shown(call.get("type"))}')
    function = call.nested("function")
    if function is None:
        call.add_problem("function", "must be given")
        return
    function.check_names({"name", "arguments", "parsed_arguments"})  # the last one is as `parsed`
    added.id = call.text("id") or ""
    added.name = function.text("name") or ""
    if not added.name:
        function.add_problem("name", "must be given")
    added.arguments = call_arguments(function)


def add_tools(fields: Fields, chat: pb.ChatPrompt) -> ToolUse | None:
    """Adds the field `tools`. Returns which of them may be called; None without tools."""
    tools = []
    for i, value in enumerate(fields.few_items("tools", MAX_TOOLS)):
        tools.append(_tool(Fields(value, f"{fields.path}tools[{i}].", fields.problems)))
        chat.tools.append(json.dumps(value))
    return chat_tool_use(fields, tools)


def add_plain_tool(tool: Fields, parameters: str, chat: pb.ChatPrompt) -> Tool:
    """Adds a tool of an API without nesting, in the form that templates expect.

    parameters  the field of its schema
    """
    schema = tool.nested(parameters)
    name = tool.required_name()
    function = {
        "name": name,
        "description": tool.text("description") or "",
        "parameters": {} if schema is None else schema.values,
    }
    chat.tools.append(json.dumps({"type": "function", "function": function}))
    return Tool(name, None if schema is None else schema.values, tool.flag("strict"))


def _tool(tool: Fields) -> Tool:
    tool.check_names({"type", "function"})
    if tool.get("type") != "function":
        tool.add_problem("type", f'must be "function", not {shown(tool.get("type"))}')
    function = tool.nested("function")
    if function is None:
        tool.add_problem("function", "must be given")
        return Tool("")
    function.check_names({"name", "description", "parameters", "strict"})
    name = function.text("name") or ""
    if not name:
        function.add_problem("name", "must be given")
    function.text("description")
    schema = function.nested("parameters")
    return Tool(name, None if schema is None else schema.values, function.flag("strict"))


def add_effort(fields: Fields, name: str, chat: pb.ChatPrompt) -> str | None:
    """Makes a field the variable `reasoning_effort` of the chat template. Templates without it do not change."""
    effort = fields.text(name)
    if effort is not None:
        chat.template_arguments["reasoning_effort"] = json.dumps(effort)
    return effort


def add_template_options(fields: Fields, chat: pb.ChatPrompt) -> None:
    """Adds `chat_template_kwargs`, `reasoning_effort`, `continue_final_message` and `add_generation_prompt`."""
    for name, value in fields.few_entries("chat_template_kwargs", MAX_TEMPLATE_ARGUMENTS).items():
        chat.template_arguments[fields.check_text("chat_template_kwargs", name)] = json.dumps(value)
    add_effort(fields, "reasoning_effort", chat)
    is_continued = fields.flag("continue_final_message")
    begins_answer = fields.flag("add_generation_prompt", default=not is_continued)
    if is_continued and begins_answer:
        fields.add_problem("add_generation_prompt", "must be false with continue_final_message")
    if not is_continued and not begins_answer:
        chat.template_arguments["add_generation_prompt"] = "false"
    if is_continued:
        chat.continue_final_message = True


def call_arguments(function: Fields) -> str:
    """Returns the field `arguments` of a call as the text of a JSON object, as templates need it.

    The model may have written no JSON, and clients send such a call back with the error of their tool.
    """
    text = function.text("arguments") or "{}"
    arguments = arguments_of(text)
    return json.dumps(arguments, ensure_ascii=False) if "invalid_json" in arguments else text
