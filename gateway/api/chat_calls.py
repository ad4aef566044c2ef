"""The answer of a chat completion whose text can have calls of tools or channels, streamed or in one piece."""

from collections import defaultdict
from typing import Any

from gateway.api.chat_answer import ChatChunks, ChatCollector, Choice, to_json
from gateway.api.endpoint import Head
from gateway.api.logprobs import chat_logprobs
from gateway.api.sampling import StreamOptions
from gateway.api.tool_calls import ChoiceReader, ToolReading
from gateway.api.usage import FINISH_REASONS
from gateway.tools.events import Arguments, CallStarted, Content, Event, Reasoning
from quire.v1 import generation_pb2 as pb


class CallChunks(ChatChunks):
    """The events of one stream. Each call has one chunk with its id and name, and further ones with its arguments."""

    def __init__(self, head: Head, options: StreamOptions, tools: ToolReading, *, has_logprobs: bool) -> None:
        super().__init__(head, options, has_logprobs=has_logprobs)
        self._tools = tools
        self._readers: dict[int, ChoiceReader] = {}

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        if message.HasField("delta"):
            delta = message.delta
            self._usage.generated(len(delta.token_ids))
            reader = self._reader(delta.index)
            events = reader.feed(delta.text, len(delta.token_ids))
            self._usage.num_reasoning_tokens[delta.index] = reader.num_reasoning_tokens
            logprobs = chat_logprobs(delta.logprobs) if self._has_logprobs else []
            return self._begun_choice(delta.index) + self._encode_events(delta.index, events, logprobs)
        if message.HasField("finished"):
            finished = message.finished
            reader = self._reader(finished.index)
            rest = self._encode_events(finished.index, reader.end(), [])
            self._usage.num_reasoning_tokens[finished.index] = reader.num_reasoning_tokens
            reason = _reason(finished, reader)
            return self._begun_choice(finished.index) + rest + self._chunk(finished.index, {}, reason)
        return super().encode(prompt, message)

    def _reader(self, index: int) -> ChoiceReader:
        if index not in self._readers:
            self._readers[index] = self._tools.reader()
        return self._readers[index]

    def _encode_events(self, index: int, events: list[Event], logprobs: list[dict[str, Any]]) -> str:
        """Returns a chunk for each event. The first one has the log-probabilities."""
        deltas = [self._delta(index, event) for event in events]
        if logprobs and not deltas:
            deltas = [{}]
        found = []
        for i, delta in enumerate(deltas):
            shown = {"content": logprobs, "refusal": None} if logprobs and i == 0 else None
            choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": None}
            found.append(f"{self._start}{to_json(choice)}{self._tail()}")
        return "".join(found)

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        match event:
            case CallStarted(call, name):
                function = {"name": name, "arguments": ""}
                call_id = self._tools.call_id("call_", index, call)
                return {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]}
            case Arguments(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
            case Reasoning(text):
                return {"reasoning_content": text}
            case _:
                return {"content": event.text}


class CallCollector(ChatCollector):
    """The response in one piece."""

    def __init__(self, head: Head, tools: ToolReading, *, has_logprobs: bool) -> None:
        super().__init__(head, has_logprobs=has_logprobs)
        self._tools = tools
        self._readers = defaultdict[int, ChoiceReader](tools.reader)
        self._events = defaultdict[int, list[Event]](list)

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        super().add(prompt, message)
        if message.HasField("delta"):
            delta = message.delta
            self._read(delta.index, self._readers[delta.index].feed(delta.text, len(delta.token_ids)))
        elif message.HasField("finished"):
            index = message.finished.index
            self._read(index, self._readers[index].end())

    def _read(self, index: int, events: list[Event]) -> None:
        self._events[index] += events
        self._usage.num_reasoning_tokens[index] = self._readers[index].num_reasoning_tokens

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        content, thoughts, calls = "", "", list[dict[str, Any]]()
        for event in self._events[index]:
            match event:
                case CallStarted(call, name):
                    call_id = self._tools.call_id("call_", index, call)
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": call_id, "type": "function", "function": function})
                case Arguments(call, text):
                    calls[call]["function"]["arguments"] += text
                case Reasoning(text):
                    thoughts += text
                case Content(text):
                    content += text
        whole = super()._choice(index, choice)
        whole["message"]["content"] = content or (None if calls else "")
        if thoughts:
            whole["message"]["reasoning_content"] = thoughts
        if calls:
            whole["message"]["tool_calls"] = calls
            whole["finish_reason"] = "tool_calls" if choice.reason == "stop" else choice.reason
        return whole


def _reason(finished: pb.Finished, reader: ChoiceReader) -> str:
    """Returns the finish reason. An answer of full length keeps it, also within a call."""
    reason = FINISH_REASONS.get(finished.reason, "stop")
    return "tool_calls" if reason == "stop" and reader.has_calls else reason
