"""The values of a chat, before a template renders it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MESSAGE_CHARACTERS = 64
"""A message or a tool costs as much as this many characters, even if it is empty."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model. `arguments` is a JSON object, as text; empty: no arguments."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat. The chat template knows the roles, such as "system", "user" and "assistant".

    reasoning_content  the text in which the model has thought before this message
    name               the name of the tool or of the participant
    tool_call_id       the call that this message, a tool's, answers
    tool_calls         the calls that this message, an assistant's, made
    """

    role: str
    content: str
    reasoning_content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are present."""
        present: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("reasoning_content", "name", "tool_call_id"):
            if (text := getattr(self, name)) is not None:
                present[name] = text
        if self.tool_calls:
            present["tool_calls"] = [[call.id, call.name, call.arguments] for call in self.tool_calls]
        return present

    def num_characters(self) -> int:
        """Returns the size of the texts, with a minimum."""
        calls = sum(
            len(call.id) + len(call.name) + len(call.arguments) + MESSAGE_CHARACTERS for call in self.tool_calls
        )
        texts = (self.role, self.content, self.reasoning_content, self.name, self.tool_call_id)
        return MESSAGE_CHARACTERS + calls + sum(len(text) for text in texts if text)


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of a chat, and what else its template receives.

    tools            JSON objects, as text
    arguments        further variables of the template: JSON values, as text, by name
    continues_last   the completion continues the last message, instead of answering it
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[str] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    continues_last: bool = False

    def num_characters(self) -> int:
        """Returns the size by which chats are compared."""
        others = (*self.tools, *self.arguments.values())
        return sum(each.num_characters() for each in self.messages) + sum(MESSAGE_CHARACTERS + len(o) for o in others)
