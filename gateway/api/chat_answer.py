"""The answer of a chat completion, streamed or in one piece.

A chunk is a template around the text: what does not change during a stream is serialised once.
"""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.logprobs import chat_logprobs, prompt_logprobs
from gateway.api.sampling import StreamOptions
from gateway.api.usage import FINISH_REASONS, UsageCounter
from quire.v1 import generation_pb2 as pb

DONE = "data: [DONE]\n\n"

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)  # json.dumps would make one for each call


class OpenAiChunks:
    """The part that streams of chats and of completions share. A chunk is `_start`, one choice as JSON, and `_tail()`.

    kind  the field `object` of the chunks
    """

    def __init__(self, head: Head, kind: str, options: StreamOptions, usage: UsageCounter) -> None:
        self._stream = options
        self._usage = usage
        chunk = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        self._start = "data: " + to_json(chunk)[:-1] + ',"choices":['
        # With `include_usage`, all chunks have the field; it is null until the last one.
        self._end = '],"usage":null}\n\n' if options.has_usage else "]}\n\n"

    def end(self) -> str:
        if not self._stream.has_usage:
            return DONE
        return f"{self._start}{self._usage_end()}{DONE}"

    def failure(self, error: ApiError) -> str:
        return f"data: {to_json(error.body)}\n\n"

    def _tail(self) -> str:
        return self._usage_end() if self._stream.has_usage_always else self._end

    def _usage_end(self) -> str:
        return f'],"usage":{to_json(self._usage.as_json())}}}\n\n'


class ChatChunks(OpenAiChunks):
    """The events of one stream."""

    def __init__(self, head: Head, options: StreamOptions, *, has_logprobs: bool) -> None:
        super().__init__(head, "chat.completion.chunk", options, UsageCounter())
        self._has_logprobs = has_logprobs
        self._begun: set[int] = set()

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        if message.HasField("delta"):
            delta = message.delta
            self._usage.generated(len(delta.token_ids))
            begin = self._begun_choice(delta.index)
            if not (delta.text or (self._has_logprobs and delta.logprobs)):
                return begin
            logprobs = "null"
            if self._has_logprobs:
                logprobs = to_json({"content": chat_logprobs(delta.logprobs), "refusal": None})
            return (
                f'{begin}{self._start}{{"index":{delta.index},"delta":{{"content":{encode_basestring(delta.text)}}},'
                f'"logprobs":{logprobs},"finish_reason":null}}{self._tail()}'
            )
        if message.HasField("finished"):
            finished = message.finished
            return self._begun_choice(finished.index) + self._chunk(
                finished.index, {}, FINISH_REASONS.get(finished.reason, "stop")
            )
        if message.HasField("started"):
            self._usage.started(message.started)
            return self._begin(0)
        return ""

    def _begun_choice(self, index: int) -> str:
        """Returns the first chunk of a choice that has none."""
        return "" if index in self._begun else self._begin(index)

    def _begin(self, index: int) -> str:
        """Returns the first chunk of a choice, which has its role."""
        self._begun.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return f"{self._start}{to_json(choice)}{self._tail()}"


@dataclass(slots=True)
class Choice:
    """One sequence while it arrives."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reason: str = "stop"


class ChatCollector:
    """The response in one piece."""

    def __init__(self, head: Head, *, has_logprobs: bool) -> None:
        self._head = head
        self._has_logprobs = has_logprobs
        self._usage = UsageCounter()
        self._choices: dict[int, Choice] = {}
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        self._has_prompt_logprobs = False

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                choice = self._choices.setdefault(delta.index, Choice())
                choice.texts.append(delta.text)
                self._usage.generated(len(delta.token_ids))
                if self._has_logprobs:
                    choice.logprobs += chat_logprobs(delta.logprobs)
            case "finished":
                choice = self._choices.setdefault(message.finished.index, Choice())
                choice.reason = FINISH_REASONS.get(message.finished.reason, "stop")
            case "started":
                self._usage.started(message.started)
            case "prompt_logprobs":
                self._has_prompt_logprobs = True
                self._prompt_logprobs.extend(message.prompt_logprobs.tokens)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, choice) for index, choice in sorted(self._choices.items())],
            "usage": self._usage.as_json(),
        }
        if self._has_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs)
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(choice.texts),
                "refusal": None,
                "annotations": [],
            },
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._has_logprobs else None,
            "finish_reason": choice.reason,
        }


def to_json(value: object) -> str:
    """Returns compact JSON. Text is not escaped to ASCII."""
    return _ENCODER.encode(value)
