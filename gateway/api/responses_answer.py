"""The answer of the Responses API, streamed or in one piece.

A stream is a sequence of numbered events about one response, its one message, and the message's one part.
"""

import time
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from gateway.api.chat_answer import to_json
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.logprobs import chat_logprobs
from quire.v1 import generation_pb2 as pb


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
        self.item_id = f"msg_{head.id.removeprefix('resp_')}"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
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
        self._texts.append(delta.text)
        logprobs = chat_logprobs(delta.logprobs) if self.settings.has_logprobs else []
        self._logprobs += logprobs
        return logprobs

    def finished(self, finished: pb.Finished) -> None:
        self._is_cut_off = finished.reason == pb.FINISH_REASON_LENGTH
        self._completed_at = None if self._is_cut_off else int(time.time())

    @property
    def status(self) -> str:
        """The status of an answer that has ended."""
        return "incomplete" if self._is_cut_off else "completed"

    def part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
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
            "output": [self.item(status)] if has_ended else [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
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


class ResponseChunks:
    """The events of one stream."""

    def __init__(self, head: Head, settings: Settings) -> None:
        self._answer = Answer(head, settings)
        self._number = -1
        self._place = {"item_id": self._answer.item_id, "output_index": 0, "content_index": 0}
        self._delta = to_json({"type": "response.output_text.delta", **self._place})[:-1]

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        match message.WhichOneof("event"):
            case "delta":
                return self._encode_delta(message.delta)
            case "finished":
                self._answer.finished(message.finished)
            case "started":
                self._answer.started(message.started)
                return self._begin()
        return ""

    def _encode_delta(self, delta: pb.Delta) -> str:
        logprobs = self._answer.add(delta)
        if not (delta.text or logprobs):
            return ""
        self._number += 1
        return (
            f'event: response.output_text.delta\ndata: {self._delta},"delta":{encode_basestring(delta.text)},'
            f'"logprobs":{to_json(logprobs)},"sequence_number":{self._number}}}\n\n'
        )

    def _begin(self) -> str:
        answer = self._answer
        return (
            self._event("response.created", response=answer.response("in_progress"))
            + self._event("response.in_progress", response=answer.response("in_progress"))
            + self._event("response.output_item.added", output_index=0, item=answer.item("in_progress"))
            + self._event("response.content_part.added", **self._place, part=answer.part())
        )

    def end(self) -> str:
        answer, part = self._answer, self._answer.part()
        return (
            self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=answer.item(answer.status))
            + self._event(f"response.{answer.status}", response=answer.response(answer.status))
        )

    def failure(self, error: ApiError) -> str:
        return self._event("response.failed", response=self._answer.response("failed", error))

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return f"event: {kind}\ndata: {to_json({'type': kind, **fields, 'sequence_number': self._number})}\n\n"


class ResponseCollector:
    """The response in one piece."""

    def __init__(self, head: Head, settings: Settings) -> None:
        self._answer = Answer(head, settings)

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "delta":
                self._answer.add(message.delta)
            case "finished":
                self._answer.finished(message.finished)
            case "started":
                self._answer.started(message.started)

    def body(self) -> dict[str, Any]:
        return self._answer.response(self._answer.status)
