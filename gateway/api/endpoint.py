"""The interface between an endpoint that generates text and the HTTP server: requests, and encoders of their answer.

Endpoints do no I/O. The server opens a stream for each request, and hands each message to the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.api.errors import ApiError
    from gateway.api.tool_calls import ToolReading
    from gateway.tools.tool_use import ToolUse
    from quire.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Head:
    """The values that all parts of an answer repeat.

    created     Unix time in seconds
    tools       makes readers of the texts; None: texts have no structure
    eos_tokens  the name of each EOS token that is known
    """

    id: str
    model: str
    created: int
    tools: ToolReading | None = None
    eos_tokens: Mapping[int, str] = field(default_factory=dict)


class Chunks(Protocol):
    """Encodes a streamed answer as server-sent events."""

    def encode(self, prompt: int, message: pb.GenerateResponse) -> str:
        """Returns the events for a message of the request with index `prompt`; may be empty."""

    def end(self) -> str:
        """Returns the last events."""

    def failure(self, error: ApiError) -> str:
        """Returns the last event of an answer that fails after its beginning."""


class Collector(Protocol):
    """Makes an answer in one piece."""

    def add(self, prompt: int, message: pb.GenerateResponse) -> None:
        """Adds a message of the request with index `prompt`."""

    def body(self) -> dict[str, Any]:
        """Returns the answer, when all requests have ended."""


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is part of the answer.

    text         the whole prompt
    first_token  the text of its first token, which has no log-probability; None if log-probabilities are not wanted
    """

    text: str
    first_token: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid body of an endpoint.

    model      the model that it names
    requests   one for each prompt
    names      the JSON field of each field of the requests, for errors
    id_prefix  the beginning of the answer's id
    tools      the tools that the model may call
    echo       the prompts are part of the answer: `chunks` and `collector` get them
    """

    model: str
    requests: Sequence[pb.GenerateRequest]
    names: Mapping[str, str]
    id_prefix: str
    is_streamed: bool
    chunks: Callable[[Head, Sequence[EchoedPrompt]], Chunks]
    collector: Callable[[Head, Sequence[EchoedPrompt]], Collector]
    echo: bool = False
    echo_logprobs: bool = field(default=False)
    tools: ToolUse | None = None

    def names_of(self, i: int) -> Mapping[str, str]:
        """Returns the names for errors of one request. They say which prompt it is if there are several."""
        if len(self.requests) == 1:
            return self.names
        return {field: f"prompt[{i}]" if name == "prompt" else name for field, name in self.names.items()}
