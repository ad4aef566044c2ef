"""A request as a client sent it, whatever door it came through. None means absent; nothing here has been checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class MessageLike(Protocol):
    """A message in whatever form a door has it: it is converted once its size has been looked at."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    beam_width: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    length_penalty: float | None = None
    early_stopping: bool | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop: bool | None = None


@dataclass(frozen=True, slots=True)
class Output:
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """Field names, and so the paths in violations, are those of `quire.v1.GenerateRequest`; but what the door knows:

    client                    its address
    traceparent, tracestate   headers of W3C Trace Context
    """

    request_id: str | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    chat: Sequence[MessageLike] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    output: Output = field(default_factory=Output)
    priority: int | None = None
    cache_salt: str | None = None
    client: str = ""
    traceparent: str | None = None
    tracestate: str | None = None
