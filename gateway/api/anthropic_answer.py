"""The answer of Anthropic's API, streamed or in one piece.

A stream is a sequence of named events: message_start, content_block_start, content_block_delta for each text,
content_block_stop, message_delta with the reason of the end, message_stop.
"""

from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from quire.v1 import generation_pb2 as pb

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

_ABSENT_USAGE = dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use"))
"""Fields that the schema of this API requires, about what this server does not have or does not count."""


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns an error in the form of this API."""
    kind = _ERROR_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


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
        self.num_output_tokens += len(delta.token_ids)
        text = delta.text
        if delta.token_ids:
            text = text.removesuffix(self._eos_tokens.get(delta.token_ids[-1], ""))
        found = next((stop for stop in self._stop if text.endswith(stop)), None)
        if found is not None:
            self._stop_sequence = found
            text = text.removesuffix(found)
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


class MessageChunks:
    """The events of one stream. `stop` are the stop sequences of the request."""

    def __init__(self, head: Head, stop: Sequence[str]) -> None:
        self._head = head
        self._answer = End(head, stop)

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        match message.WhichOneof("event"):
            case "delta":
                if not (text := self._answer.text_of(message.delta)):
                    return ""
                return (
                    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
                    f'"delta":{{"type":"text_delta","text":{encode_basestring(text)}}}}}\n\n'
                )
            case "finished":
                self._answer.finished(message.finished)
            case "started":
                self._answer.started(message.started)
                return event_text("message_start", message=message_body(self._head, [], self._answer)) + event_text(
                    "content_block_start", index=0, content_block=text_block("")
                )
        return ""

    def end(self) -> str:
        return (
            event_text("content_block_stop", index=0)
            + event_text("message_delta", delta=self._answer.as_json(), usage=self._answer.usage())
            + event_text("message_stop")
        )

    def failure(self, error: ApiError) -> str:
        return f"event: error\ndata: {to_json(error_body(error))}\n\n"


class MessageCollector:
    """The response in one piece. `stop` are the stop sequences of the request."""

    def __init__(self, head: Head, stop: Sequence[str]) -> None:
        self._head = head
        self._answer = End(head, stop)
        self._texts: list[str] = []

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "delta":
                self._texts.append(self._answer.text_of(message.delta))
            case "finished":
                self._answer.finished(message.finished)
            case "started":
                self._answer.started(message.started)

    def body(self) -> dict[str, Any]:
        return message_body(self._head, [text_block("".join(self._texts))], self._answer)


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def message_body(head: Head, content: list[dict[str, Any]], answer: End) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **answer.as_json(),
        "usage": answer.usage(),
    }


def event_text(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n"
