"""The answer of a completion, streamed or in one piece. Its choices are those of the first prompt, then of the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from gateway.api.chat_answer import OpenAiChunks, to_json
from gateway.api.logprobs import LegacyLogprobs, prompt_logprobs
from gateway.api.usage import FINISH_REASONS, UsageCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.api.endpoint import EchoedPrompt, Head
    from gateway.api.sampling import StreamOptions
    from quire.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """The parts of an answer that a request wants.

    num_choices     sequences of each prompt
    num_returned    with `best_of`: the best sequences of each prompt that are returned; None: all of them
    num_top         most probable tokens in `logprobs`; None: there are no `logprobs`
    num_prompt_top  the same of `prompt_logprobs`
    has_text        False: no generated token is shown, only the prompt
    """

    num_choices: int
    num_returned: int | None
    num_top: int | None
    num_prompt_top: int | None
    has_text: bool
    stream: StreamOptions

    @property
    def has_logprobs(self) -> bool:
        return self.num_top is not None


@dataclass(slots=True)
class _Choice:
    """One sequence while it arrives."""

    logprobs: LegacyLogprobs
    texts: list[str] = field(default_factory=list)
    reason: str = "stop"
    num_tokens: int = 0
    sum_logprobs: float = 0.0

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(1, self.num_tokens)


class _Answer:
    """The choices of an answer in either form, each with its prompt at the beginning if that is echoed."""

    def __init__(self, head: Head, options: CompletionOptions, prompts: Sequence[EchoedPrompt]) -> None:
        self._head = head
        self._options = options
        self._has_text = options.has_text
        self._has_logprobs = options.has_logprobs
        self._prompts = prompts
        self.usage = UsageCounter()
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._prompt_logprobs: dict[int, list[pb.TokenLogprobs]] = {}

    def _choice(self, prompt: int, index: int) -> _Choice:
        """Returns a choice; a new one begins with the echo of its prompt."""
        choice = self._choices.get((prompt, index))
        if choice is None:
            choice = self._choices[prompt, index] = _Choice(LegacyLogprobs(self._options.num_top))
            if self._prompts:
                echoed = self._prompts[prompt]
                choice.texts.append(echoed.text)
                if self._has_logprobs and echoed.first_token is not None:
                    found = self._prompt_logprobs.get(prompt, ())
                    choice.logprobs.add_prompt(echoed.text, echoed.first_token, found)
        return choice

    def take(self, prompt: int, message: pb.GenerateResponse) -> _Choice | None:
        """Adds a message; returns the choice that it is about, if any."""
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                choice = self._choices.get((prompt, delta.index)) or self._choice(prompt, delta.index)
                if self._has_text:
                    num_tokens = len(delta.token_ids)
                    choice.texts.append(delta.text)
                    choice.num_tokens += num_tokens
                    self.usage.generated(num_tokens)
                    if self._options.num_returned is not None:
                        choice.sum_logprobs += sum(each.chosen.logprob for each in delta.logprobs)
                    if self._has_logprobs:
                        choice.logprobs.add(delta.logprobs)
                return choice
            case "finished":
                choice = self._choice(prompt, message.finished.index)
                choice.reason = FINISH_REASONS.get(message.finished.reason, "stop") if self._has_text else "length"
                return choice
            case "started":
                self.usage.started(message.started)
            case "prompt_logprobs":
                self._prompt_logprobs.setdefault(prompt, []).extend(message.prompt_logprobs.tokens)
        return None


class CompletionChunks(OpenAiChunks):
    """The events of one stream."""

    def __init__(self, head: Head, options: CompletionOptions, prompts: Sequence[EchoedPrompt]) -> None:
        self._answer = _Answer(head, options, prompts)
        self._num_choices = options.num_choices
        self._has_logprobs = options.has_logprobs
        super().__init__(head, "text_completion", options.stream, self._answer.usage)

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        choice = self._answer.take(prompt, message)
        if choice is None:
            return ""
        is_end = message.HasField("finished")
        text, choice.texts = "".join(choice.texts), []
        taken = choice.logprobs.take() if self._has_logprobs else None
        if not (text or is_end or (taken and taken["tokens"])):
            return ""
        index = prompt * self._num_choices + (message.finished.index if is_end else message.delta.index)
        logprobs = "null" if taken is None else to_json(taken)
        reason = to_json(choice.reason) if is_end else "null"
        return (
            f'{self._start}{{"index":{index},"text":{encode_basestring(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}{self._tail()}'
        )


class CompletionCollector(_Answer):
    """The response in one piece."""

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        self.take(prompt, message)

    def body(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt in sorted({prompt for prompt, _ in self._choices}):
            found = [(i, choice) for (number, i), choice in sorted(self._choices.items()) if number == prompt]
            if self._options.num_returned is not None:
                found.sort(key=lambda each: -each[1].mean_logprob)
                found = found[: self._options.num_returned]
            choices += [self._as_json(len(choices) + i, prompt, choice) for i, (_, choice) in enumerate(found)]
        return {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
            "usage": self.usage.as_json(),
        }

    def _as_json(self, index: int, prompt: int, choice: _Choice) -> dict[str, Any]:
        body = {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": choice.logprobs.take() if self._options.has_logprobs else None,
            "finish_reason": choice.reason,
        }
        if (num_top := self._options.num_prompt_top) is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs.get(prompt, ()), num_top)
        return body
