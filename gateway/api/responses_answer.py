"""The answer of the Responses API, streamed or in one piece.

Its output is a list of items: messages, calls of functions and reasoning, in the order in which the model wrote them. A
stream is a sequence of numbered events about the response, its items, and the one part that a message or a reasoning
has.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Literal

from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.logprobs import chat_logprobs
from gateway.api.message_logprobs import MessageLogprobs
from gateway.api.tool_calls import PlainText
from gateway.tools.events import Arguments, CallStarted, Content, Event, Markup, Reasoning
from quire.v1 import generation_pb2 as pb

Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of a request that its answer depends on. `repeated` are fields that the answer repeats."""

    has_logprobs: bool
    repeated: dict[str, Any]


class Answer:
    """The state of one response. num_reasoning_tokens: the output tokens of thoughts."""

    def __init__(self, head: Head, settings: Settings) -> None:
        self.head = head
        self.settings = settings
        self._num_input_tokens = self._num_cached_tokens = self._num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self._is_cut_off = False
        self._completed_at: int | None = None

    def started(self, started: pb.Started) -> None:
        self._num_input_tokens = started.prompt_tokens
        self._num_cached_tokens = started.cached_tokens

    def add(self, delta: pb.Delta) -> list[dict[str, Any]]:
        """Adds a delta, and returns its log-probabilities."""
        self._num_output_tokens += len(delta.token_ids)
        return chat_logprobs(delta.logprobs) if self.settings.has_logprobs else []

    def finished(self, finished: pb.Finished) -> None:
        self._is_cut_off = finished.reason == pb.FINISH_REASON_LENGTH
        self._completed_at = None if self._is_cut_off else int(time.time())

    @property
    def status(self) -> str:
        """The status of an answer that has ended."""
        return "incomplete" if self._is_cut_off else "completed"

    def response(
        self, status: str, output: Sequence[dict[str, Any]] = (), error: ApiError | None = None
    ) -> dict[str, Any]:
        """Returns the response object. `status` is "in_progress", "completed", "incomplete" or "failed"."""
        has_ended = status in ("completed", "incomplete")
        repeated = self.settings.repeated
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "background": False,
            "service_tier": "default",
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "max_tool_calls": None,
            "error": None if error is None else {"code": error.code or "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.head.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage() if has_ended else None,
            "user": None,
            **{name: value if value is not None else _DEFAULTS.get(name) for name, value in repeated.items()},
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_input_tokens,
            "input_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "output_tokens": self._num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self._num_input_tokens + self._num_output_tokens,
        }


_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
"""Values that OpenAI's clients expect of absent fields. A checkpoint may have other defaults, which only the scheduler
knows."""


class _Item:
    """One item of the output while it arrives."""

    def __init__(self, kind: Kind, index: int, answer_id: str, call: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{_PREFIXES[kind]}_{answer_id}{index}"
        self.call = call or {}
        self.place = {"item_id": self.id, "output_index": index}
        if kind != "function_call":
            self.place["content_index"] = 0
        event = f"{_TEXT_EVENTS[kind]}.delta"
        self._delta = f'event: {event}\ndata: {to_json({"type": event, **self.place})[:-1]},"delta":'
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str, logprobs: Sequence[dict[str, Any]], number: int) -> str:
        """Adds text, and returns its event, which has this number."""
        self._texts.append(text)
        shown = ""
        if self.kind == "message":
            self._logprobs += logprobs
            shown = f',"logprobs":{to_json(logprobs)}' if logprobs else ',"logprobs":[]'
        return f'{self._delta}{encode_basestring(text)}{shown},"sequence_number":{number}}}\n\n'

    def done(self) -> dict[str, Any]:
        """Returns the fields of the event that ends the text."""
        match self.kind:
            case "function_call":
                return {**self.place, "name": self.call["name"], "arguments": self.text}
            case "reasoning":
                return {**self.place, "text": self.text}
            case _:
                return {**self.place, "text": self.text, "logprobs": self._logprobs}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

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


class ResponseChunks:
    """The events of one stream."""

    def __init__(self, head: Head, settings: Settings) -> None:
        self._answer = Answer(head, settings)
        self._tools = head.tools
        self._reader = PlainText() if head.tools is None else head.tools.reader(has_markup=True)
        self._logprobs = MessageLogprobs()
        self._answer_id = head.id.removeprefix("resp_")
        self._number = -1
        self._items: list[_Item] = []
        self._open: _Item | None = None

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                self._logprobs.add(delta.text, self._answer.add(delta))
                return self._encode_events(self._reader.feed(delta.text, len(delta.token_ids)))
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
        return self._event("response.failed", response=self._answer.response("failed", error=error))

    def body(self) -> dict[str, Any]:
        """Returns the response, when it is complete."""
        status = self._answer.status
        last = len(self._items) - 1
        output = [item.as_json(status if item.index == last else "completed") for item in self._items]
        return self._answer.response(status, output)

    def _encode_events(self, events: list[Event]) -> str:
        found = ""
        for event in events:
            match event:
                case Content():
                    logprobs = self._logprobs.cover(event.text, is_message=True)
                    found += self._begin("message") + self._add_text(event.text, logprobs)
                case Reasoning():
                    self._logprobs.cover(event.text)
                    found += self._begin("reasoning") + self._add_text(event.text)
                case Markup():
                    self._logprobs.cover(event.text)
                case Arguments():
                    if event.is_written:
                        self._logprobs.cover(event.text)
                    found += self._add_text(event.text)
                case CallStarted(call, name) if self._tools is not None:
                    call_id = self._tools.call_id("call_", 0, call)
                    found += self._begin("function_call", {"call_id": call_id, "name": name})
        return found + self._encode_rest()

    def _encode_rest(self, *, is_end: bool = False) -> str:
        """Adds tokens without text to the open item. Only messages have log-probabilities."""
        if self._open is None:
            return ""
        rest = self._logprobs.rest(is_end=is_end)
        return self._add_text("", rest) if rest and self._open.kind == "message" else ""

    def _add_text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> str:
        """Adds text to the open item."""
        if self._open is None:
            return ""
        self._number += 1
        return self._open.add(text, logprobs, self._number)

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
            events += self._event("response.content_part.added", **item.place, part=item.part())
        return events

    def _close(self, status: str) -> str:
        """Ends the open item."""
        if self._open is None:
            return ""
        item, self._open = self._open, None
        events = self._event(f"{_TEXT_EVENTS[item.kind]}.done", **item.done())
        if item.kind != "function_call":
            events += self._event("response.content_part.done", **item.place, part=item.part())
        return events + self._event("response.output_item.done", output_index=item.index, item=item.as_json(status))

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return f"event: {kind}\ndata: {to_json({'type': kind, **fields, 'sequence_number': self._number})}\n\n"


class ResponseCollector:
    """The response in one piece: that of the stream's last event."""

    def __init__(self, head: Head, settings: Settings) -> None:
        self._chunks = ResponseChunks(head, settings)

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        self._chunks.encode(prompt, message)

    def body(self) -> dict[str, Any]:
        self._chunks.end()
        return self._chunks.body()
