"""Checks the fields of a chat."""

from collections.abc import Mapping
from typing import Any

from scheduler.requests.limits import RequestLimits
from scheduler.requests.request_fields import RequestFields
from scheduler.text.chat_messages import Chat, ChatMessage, ToolCall


class _Texts:
    """Checks the texts of one chat, whose bytes are limited together."""

    def __init__(self, fields: RequestFields, max_bytes: int) -> None:
        self._fields = fields
        self._num_bytes_left = max_bytes

    def required(self, path: str, value: Any) -> str:
        """Returns a text that must not be empty."""
        text = self.checked(path, value)
        if not text:
            self._fields.add_violation(path, "must not be empty")
        return text

    def checked(self, path: str, value: Any) -> str:
        text = self._fields.check_text(path, value, self._num_bytes_left)
        self._num_bytes_left -= len(text) if text.isascii() else len(text.encode())
        return text

    def optional(self, path: str, value: Any) -> str | None:
        """Returns None for an absent text; protobuf reads one as an empty text."""
        return self.checked(path, value) if value else None


def read_chat(fields: RequestFields, limits: RequestLimits) -> Chat | None:
    """Returns the chat. None after a violation: only the first bad message or tool is one."""
    messages = fields.items("chat.messages")
    if not 1 <= len(messages) <= limits.max_chat_messages:
        problem = f"must be from 1 to {limits.max_chat_messages}, not {len(messages)}"
        fields.add_violation("chat.messages", problem)
        return None
    texts = _Texts(fields, limits.max_prompt_bytes)
    checked = []
    for i, message in enumerate(messages):
        checked.append(_read_message(message, f"chat.messages[{i}]", texts))
        if fields.violations:
            return None
    tools = [
        texts.required(f"chat.tools[{i}]", tool)
        for i, tool in enumerate(fields.items("chat.tools", limits.max_num_tools))
    ]
    arguments = _read_arguments(fields, limits, texts)
    return Chat(checked, tools, arguments, fields.flag("chat.continue_final_message"))


def _read_message(message: Any, path: str, texts: _Texts) -> ChatMessage:
    role = texts.required(f"{path}.role", message.role)
    content = texts.checked(f"{path}.content", message.content)
    if not (message.reasoning_content or message.name or message.tool_call_id or message.tool_calls):
        return ChatMessage(role, content)
    return ChatMessage(
        role,
        content,
        reasoning_content=texts.optional(f"{path}.reasoning_content", message.reasoning_content),
        name=texts.optional(f"{path}.name", message.name),
        tool_call_id=texts.optional(f"{path}.tool_call_id", message.tool_call_id),
        tool_calls=tuple(
            _read_tool_call(call, f"{path}.tool_calls[{i}]", texts) for i, call in enumerate(message.tool_calls)
        ),
    )


def _read_tool_call(call: Any, path: str, texts: _Texts) -> ToolCall:
    return ToolCall(
        texts.checked(f"{path}.id", call.id),
        texts.required(f"{path}.name", call.name),
        texts.checked(f"{path}.arguments", call.arguments),
    )


def _read_arguments(fields: RequestFields, limits: RequestLimits, texts: _Texts) -> Mapping[str, str]:
    arguments = {}
    for name, value in (fields.get("chat.template_arguments") or {}).items():
        path = f"chat.template_arguments[{name[:40]}]"
        if name not in limits.template_arguments:
            allowed = ", ".join(sorted(limits.template_arguments)) or "none"
            fields.add_violation(path, f"is not allowed here; allowed: {allowed}")
        else:
            arguments[name] = texts.checked(path, value)
    return arguments
