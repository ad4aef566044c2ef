"""The answer of Anthropic's API whose text can have calls of tools or channels, streamed or in one piece.

Its content is a list of blocks: text, thinking and tool_use, in the order in which the model wrote them.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from gateway.api.anthropic_answer import End, error_body, event_text, message_body, text_block
from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.json_values import is_writable
from gateway.api.tool_calls import ToolReading
from gateway.tools.events import Arguments, CallStarted, Event, Reasoning
from quire.v1 import generation_pb2 as pb

Kind = Literal["text", "thinking", "tool_use"]
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class _Block:
    """One block of the content while it arrives."""

    def __init__(self, kind: Kind, call: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.call = call or {}
        self.texts: list[str] = []

    def start(self) -> dict[str, Any]:
        match self.kind:
            case "tool_use":
                return {"type": "tool_use", **self.call, "input": {}, "caller": {"type": "direct"}}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                return text_block("")

    def delta(self, text: str) -> dict[str, Any]:
        if self.kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        kind, name = _DELTAS[self.kind]
        return {"type": kind, name: text}

    def whole(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.kind == "tool_use":
            return self.start() | {"input": _input(text)}
        return self.start() | {_DELTAS[self.kind][1]: text}


class CallMessageChunks:
    """The events of one stream. `stop` are the stop sequences of the request."""

    def __init__(self, head: Head, stop: Sequence[str], tools: ToolReading) -> None:
        self._head = head
        self._answer = End(head, stop)
        self._tools = tools
        self._reader = tools.reader()
        self._blocks: list[_Block] = []

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        match message.WhichOneof("event"):
            case "delta":
                return self._encode_events(
                    self._reader.feed(self._answer.text_of(message.delta), len(message.delta.token_ids))
                )
            case "finished":
                events = self._encode_events(self._reader.end())
                self._answer.finished(message.finished, has_calls=self._reader.has_calls)
                return events
            case "started":
                self._answer.started(message.started)
                return event_text("message_start", message=message_body(self._head, [], self._answer))
        return ""

    def end(self) -> str:
        begun = "" if self._blocks else self._begin(_Block("text"))
        return (
            begun
            + event_text("content_block_stop", index=len(self._blocks) - 1)
            + event_text("message_delta", delta=self._answer.as_json(), usage=self._answer.usage())
            + event_text("message_stop")
        )

    def failure(self, error: ApiError) -> str:
        return f"event: error\ndata: {to_json(error_body(error))}\n\n"

    def body(self) -> dict[str, Any]:
        """Returns the message, when it is complete."""
        return message_body(self._head, [block.whole() for block in self._blocks], self._answer)

    def _encode_events(self, events: list[Event]) -> str:
        return "".join(map(self._encode_event, events))

    def _encode_event(self, event: Event) -> str:
        match event:
            case CallStarted(call, name):
                return self._begin(_Block("tool_use", {"id": self._tools.call_id("toolu_", 0, call), "name": name}))
            case Arguments(_, text):
                return self._add_text("tool_use", text)
            case Reasoning(text):
                return self._add_text("thinking", text)
            case _:
                return self._add_text("text", event.text)

    def _add_text(self, kind: Kind, text: str) -> str:
        begun = "" if self._blocks and self._blocks[-1].kind == kind else self._begin(_Block(kind))
        block = self._blocks[-1]
        block.texts.append(text)
        return begun + event_text("content_block_delta", index=len(self._blocks) - 1, delta=block.delta(text))

    def _begin(self, block: _Block) -> str:
        """Begins a block, and ends the one before it."""
        index = len(self._blocks)
        ended = event_text("content_block_stop", index=index - 1) if self._blocks else ""
        self._blocks.append(block)
        return ended + event_text("content_block_start", index=index, content_block=block.start())


class CallMessageCollector:
    """The response in one piece."""

    def __init__(self, head: Head, stop: Sequence[str], tools: ToolReading) -> None:
        self._chunks = CallMessageChunks(head, stop, tools)

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        self._chunks.encode(prompt, message)

    def body(self) -> dict[str, Any]:
        self._chunks.end()
        return self._chunks.body()


def _input(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object. Text that is none, as of a call that broke off, becomes a field."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) and is_writable(found) else {"invalid_json": text}
