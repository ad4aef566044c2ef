"""The answer of the Responses API whose text can have calls of tools or channels, streamed or in one piece.

Its output is a list of items: messages, calls of functions and reasoning, in the order in which the model wrote them.
"""

from typing import Any, Literal

from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.message_logprobs import MessageLogprobs
from gateway.api.responses_answer import Answer, Settings
from gateway.api.tool_calls import ToolReading
from gateway.tools.events import Arguments, CallStarted, Event, Markup, Reasoning
from quire.v1 import generation_pb2 as pb

Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class _Item:
    """One item of the output while it arrives."""

    def __init__(self, kind: Kind, index: int, answer_id: str, call: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{_PREFIXES[kind]}_{answer_id}{index}"
        self.call = call or {}
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def as_json(self, status: str) -> dict[str, Any]:
        base = {"id": self.id, "type": self.kind, "status": status}
        content = [] if status == "in_progress" else [self.part()]
        match self.kind:
            case "function_call":
                return {**base, **self.call, "arguments": self.text}
            case "reasoning":
                return {**base, "summary": [], "content": content}
            case _:
                return {**base, "role": "assistant", "content": content}


class CallResponseChunks:
    """The events of one stream."""

    def __init__(self, head: Head, settings: Settings, tools: ToolReading) -> None:
        self._answer = Answer(head, settings)
        self._tools = tools
        self._reader = tools.reader(has_markup=True)
        self._logprobs = MessageLogprobs()
        self._answer_id = head.id.removeprefix("resp_")
        self._number = -1
        self._items: list[_Item] = []
        self._open: _Item | None = None

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        match message.WhichOneof("event"):
            case "delta":
                self._logprobs.add(message.delta.text, self._answer.add(message.delta))
                events = self._reader.feed(message.delta.text, len(message.delta.token_ids))
                return self._encode_events(events)
            case "finished":
                shown = self._encode_events(self._reader.end()) + self._encode_rest(is_end=True)
                self._answer.num_reasoning_tokens = self._reader.num_reasoning_tokens
                self._answer.finished(message.finished)
                return shown
            case "started":
                self._answer.started(message.started)
                response = self._answer.response("in_progress")
                return self._event("response.created", response=response) + self._event(
                    "response.in_progress", response=response
                )
        return ""

    def end(self) -> str:
        # The model has written nothing, or the last item is still open.
        events = self._begin("message") + self._encode_rest(is_end=True) if not self._items else ""
        events += self._close(self._answer.status)
        return events + self._event(f"response.{self._answer.status}", response=self.body())

    def failure(self, error: ApiError) -> str:
        return self._event("response.failed", response=self._answer.response("failed", error))

    def body(self) -> dict[str, Any]:
        """Returns the response, when it is complete."""
        status = self._answer.status
        last = len(self._items) - 1
        output = [item.as_json(status if item.index == last else "completed") for item in self._items]
        return self._answer.response(status) | {"output": output}

    def _encode_events(self, events: list[Event]) -> str:
        found = []
        for event in events:
            match event:
                case CallStarted(call, name):
                    call_id = self._tools.call_id("call_", 0, call)
                    found.append(self._begin("function_call", {"call_id": call_id, "name": name}))
                case Arguments(_, text, is_written):
                    if is_written:
                        self._logprobs.cover(text)
                    found.append(self._add_text("response.function_call_arguments", text))
                case Markup(text):
                    self._logprobs.cover(text)
                case Reasoning(text):
                    self._logprobs.cover(text)
                    found.append(
                        self._begin("reasoning") + self._add_text("response.reasoning_text", text, content_index=0)
                    )
                case _:
                    logprobs = self._logprobs.cover(event.text, is_message=True)
                    found.append(self._begin("message") + self._add_to_message(event.text, logprobs))
        return "".join(found) + self._encode_rest()

    def _encode_rest(self, *, is_end: bool = False) -> str:
        """Adds tokens without text to the open item. Only messages have log-probabilities."""
        if self._open is None:
            return ""
        rest = self._logprobs.rest(is_end=is_end)
        return self._add_to_message("", rest) if rest and self._open.kind == "message" else ""

    def _add_to_message(self, text: str, logprobs: list[dict[str, Any]]) -> str:
        if self._open is not None:
            self._open.logprobs += logprobs
        return self._add_text("response.output_text", text, content_index=0, logprobs=logprobs)

    def _add_text(self, kind: str, text: str, **extra: Any) -> str:
        """Adds text to the open item."""
        if self._open is None:
            return ""
        self._open.texts.append(text)
        return self._event(f"{kind}.delta", **self._open.place, **extra, delta=text)

    def _begin(self, kind: Kind, call: dict[str, Any] | None = None) -> str:
        """Begins an item, unless one of its kind is open. Each call is an item of its own."""
        if self._open is not None and self._open.kind == kind and call is None:
            return ""
        events = self._close("completed")
        item = self._open = _Item(kind, len(self._items), self._answer_id, call)
        self._items.append(item)
        added = item.as_json("in_progress")
        events += self._event("response.output_item.added", output_index=item.index, item=added)
        if call is None:
            events += self._event("response.content_part.added", **item.place, content_index=0, part=item.part())
        return events

    def _close(self, status: str) -> str:
        """Ends the open item."""
        if self._open is None:
            return ""
        item, self._open = self._open, None
        if item.kind == "function_call":
            fields = {**item.place, "name": item.call["name"], "arguments": item.text}
            events = self._event("response.function_call_arguments.done", **fields)
        else:
            place = item.place | {"content_index": 0}
            extra = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = self._event(f"{_TEXT_EVENTS[item.kind]}.done", **place, text=item.text, **extra)
            events += self._event("response.content_part.done", **place, part=item.part())
        return events + self._event("response.output_item.done", output_index=item.index, item=item.as_json(status))

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return f"event: {kind}\ndata: {to_json({'type': kind, **fields, 'sequence_number': self._number})}\n\n"


class CallResponseCollector:
    """The response in one piece: that of the stream's last event."""

    def __init__(self, head: Head, settings: Settings, tools: ToolReading) -> None:
        self._chunks = CallResponseChunks(head, settings, tools)

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        self._chunks.encode(prompt, message)

    def body(self) -> dict[str, Any]:
        self._chunks.end()
        return self._chunks.body()
