"""The answer of Anthropic's API, streamed or in one piece.

Its content is a list of blocks: text, thinking and tool_use, in the order in which the model wrote them. A stream is a
sequence of named events: message_start; for each block content_block_start, content_block_delta for each text, and
content_block_stop; then message_delta with the reason of the end, and message_stop.
"""

from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any, Literal

from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.json_values import arguments_of
from gateway.api.tool_calls import PlainText
from gateway.tools.events import Arguments, CallStarted, Content, Event, Reasoning
from quire.v1 import generation_pb2 as pb

Kind = Literal["text", "thinking", "tool_use"]

_ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_DELTAS: dict[Kind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and their field of its text."""

_ABSENT_USAGE = dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use"))
"""Fields that the schema of this API requires, about what this server does not have or does not count."""


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns an error in the form of this API."""
    kind = _ERROR_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


class End:
    """Counts tokens, and finds out why the answer ended. The text arrives with the stop string that ended it."""

    def __init__(self, head: Head, stop: Sequence[str]) -> None:
        self._eos_tokens = head.eos_tokens
        self._stop = sorted(stop, key=len, reverse=True)
        self._stop_sequence: str | None = None
        self._reason: str | None = None
        self._num_input_tokens = self._num_cached_tokens = self.num_output_tokens = 0

    def started(self, started: pb.Started) -> None:
        self._num_input_tokens = started.prompt_tokens
        self._num_cached_tokens = started.cached_tokens

    def text_of(self, delta: pb.Delta) -> str:
        """Returns the text of a delta, without a stop string or the name of an EOS token at its end.

        A text that may become a stop string is held back by the scheduler, so such a string ends in the delta in which
        it begins. An EOS token is the last one; the text has its name if it is not a special token.
        """
        token_ids, text = delta.token_ids, delta.text
        self.num_output_tokens += len(token_ids)
        if self._eos_tokens and token_ids:
            text = text.removesuffix(self._eos_tokens.get(token_ids[-1], ""))
        for stop in self._stop:
            if text.endswith(stop):
                self._stop_sequence = stop
                return text.removesuffix(stop)
        return text

    def finished(self, finished: pb.Finished, *, has_calls: bool = False) -> None:
        if finished.reason == pb.FINISH_REASON_LENGTH:
            self._reason = "max_tokens"
        elif has_calls and self._stop_sequence is None:
            self._reason = "tool_use"
        else:
            self._reason = "end_turn" if self._stop_sequence is None else "stop_sequence"

    def as_json(self) -> dict[str, Any]:
        return {
            "stop_reason": self._reason,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
            "container": None,
        }

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_input_tokens - self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "service_tier": "standard",
            **_ABSENT_USAGE,
        }


class _Block:
    """One block of the content while it arrives."""

    def __init__(self, kind: Kind, index: int, call: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.index = index
        self._call = call or {}
        self._texts: list[str] = []
        delta, name = _DELTAS[kind]
        self._delta = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{index},'
            f'"delta":{{"type":"{delta}","{name}":'
        )

    def start(self) -> dict[str, Any]:
        match self.kind:
            case "tool_use":
                return {"type": "tool_use", **self._call, "input": {}, "caller": {"type": "direct"}}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                return {"type": "text", "text": "", "citations": None}

    def add(self, text: str) -> str:
        """Adds text, and returns its event."""
        self._texts.append(text)
        return f"{self._delta}{encode_basestring(text)}}}}}\n\n"

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return self.start() | ({"input": arguments_of(text)} if self.kind == "tool_use" else {self.kind: text})


class MessageChunks:
    """The events of one stream. `stop` are the stop sequences of the request."""

    def __init__(self, head: Head, stop: Sequence[str]) -> None:
        self._head = head
        self._answer = End(head, stop)
        self._reader = PlainText() if head.tools is None else head.tools.reader()
        self._blocks: list[_Block] = []

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                return self._encode_events(self._reader.feed(self._answer.text_of(delta), len(delta.token_ids)))
            case "finished":
                events = self._encode_events(self._reader.end())
                self._answer.finished(message.finished, has_calls=self._reader.has_calls)
                return events
            case "started":
                self._answer.started(message.started)
                return _event_text("message_start", message=_message_body(self._head, [], self._answer))
        return ""

    def end(self) -> str:
        begun = "" if self._blocks else self._begin("text")
        return (
            begun
            + _event_text("content_block_stop", index=len(self._blocks) - 1)
            + _event_text("message_delta", delta=self._answer.as_json(), usage=self._answer.usage())
            + _event_text("message_stop")
        )

    def failure(self, error: ApiError) -> str:
        return f"event: error\ndata: {to_json(error_body(error))}\n\n"

    def body(self) -> dict[str, Any]:
        """Returns the message, when it is complete."""
        return _message_body(self._head, [block.whole() for block in self._blocks], self._answer)

    def _encode_events(self, events: list[Event]) -> str:
        found = ""
        for event in events:
            match event:
                case Content():
                    found += self._add_text("text", event.text)
                case Reasoning():
                    found += self._add_text("thinking", event.text)
                case Arguments():
                    found += self._add_text("tool_use", event.text)
                case CallStarted(call, name) if self._head.tools is not None:
                    call_id = self._head.tools.call_id("toolu_", 0, call)
                    found += self._begin("tool_use", {"id": call_id, "name": name})
        return found

    def _add_text(self, kind: Kind, text: str) -> str:
        begun = "" if self._blocks and self._blocks[-1].kind == kind else self._begin(kind)
        return begun + self._blocks[-1].add(text)

    def _begin(self, kind: Kind, call: dict[str, Any] | None = None) -> str:
        """Begins a block, and ends the one before it."""
        block = _Block(kind, len(self._blocks), call)
        ended = _event_text("content_block_stop", index=block.index - 1) if self._blocks else ""
        self._blocks.append(block)
        return ended + _event_text("content_block_start", index=block.index, content_block=block.start())


class MessageCollector:
    """The response in one piece. `stop` are the stop sequences of the request."""

    def __init__(self, head: Head, stop: Sequence[str]) -> None:
        self._chunks = MessageChunks(head, stop)

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        self._chunks.encode(prompt, message)

    def body(self) -> dict[str, Any]:
        self._chunks.end()
        return self._chunks.body()


def _message_body(head: Head, content: list[dict[str, Any]], answer: End) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **answer.as_json(),
        "usage": answer.usage(),
    }


def _event_text(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n"
