"""The values of the generation API: prompts go in, events come out. They do not depend on gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypedDict


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat prompt.

    role  as the checkpoint's chat template knows it: "system", "user", "assistant"
    """

    role: str
    content: str


class ChatMessageDict(TypedDict):
    """A chat message written as a dict."""

    role: str
    content: str


# Text, token ids, or the messages of a chat. It is one sequence for all, because type checkers do not find the type of
# a list of dicts if several could be meant; mixing them raises TypeError or InvalidRequestError.
Prompt: TypeAlias = str | Sequence[int | ChatMessage | ChatMessageDict]


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sequence, and how often it was preempted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and its rank: 1 is the most probable.

    token_bytes  the bytes for which the token stands, which need not be whole characters; None: not requested
    """

    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the most probable ones at its position, most probable first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request has left the queue. This is the first event, and comes once."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, from `first_position` on. They come before the first Delta.

    The token at position 0 has none.
    """

    first_position: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The text and tokens that sequence `index` has gained since its last Delta. Text is whole characters.

    logprobs  one for each of `token_ids`, if requested
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Sequence `index` has ended. This event comes once for each sequence.

    score  of a beam: the sum of its log-probabilities over its length to the power of length_penalty
    """

    index: int
    reason: FinishReason
    usage: Usage
    score: float | None = None


Event: TypeAlias = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class CompletedSequence:
    """A complete sequence. Only beams have a `score`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete request: its sequences by index, beams best first.

    `text`, `token_ids`, `reason` and `usage` are those of the first sequence.

    prompt_logprobs  of the prompt's tokens except the first, if requested
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    sequences: tuple[CompletedSequence, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(sequence.text for sequence in self.sequences)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.sequences[0].token_ids

    @property
    def reason(self) -> FinishReason:
        return self.sequences[0].reason

    @property
    def usage(self) -> Usage:
        return self.sequences[0].usage
