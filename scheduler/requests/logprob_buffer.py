"""Buffers log-probabilities for a client that may be slow, as arrays of numbers.

A token with its k most probable alternatives takes 12 · (k + 1) bytes here; Python objects would take ten times that.
Messages are made when they are taken.
"""

from array import array
from collections.abc import Callable, Sequence

from quire.v1 import generation_pb2 as pb
from scheduler.core import TokenLogprobs
from scheduler.requests.logprob_encoding import messages

MAX_LOGPROBS = 2048
"""Maximum number of log-probabilities in a message, so that every client can receive it."""

_MANY = 64
"""Number of log-probabilities from which on they are encoded at once, which takes a constant time in addition."""


class LogprobBuffer:
    """A queue of tokens with `width` log-probabilities each: the token's own, then the most probable ones.

    token_bytes  returns the bytes of a token; None: the messages have none
    """

    __slots__ = ("_ids", "_ranks", "_start", "_token_bytes", "_values", "_width")

    def __init__(self, width: int, token_bytes: Callable[[int], bytes] | None = None) -> None:
        self._width = width
        self._token_bytes = token_bytes
        self._start = 0  # index of the first entry that was not taken
        self._ids = array("I")
        self._values = array("f")
        self._ranks = array("I")

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return (len(self._ids) - self._start) // self._width

    def extend(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Appends tokens. Raises ValueError for a token that does not have `width` entries."""
        for token in tokens:
            if not len(token.token_ids) == len(token.values) == len(token.ranks) == self._width:
                raise ValueError(f"log-probabilities of {len(token.token_ids)} tokens, expected {self._width}")
            self._ids.extend(token.token_ids)
            self._values.extend(token.values)
            self._ranks.extend(token.ranks)

    def take(self, num_tokens: int) -> list[pb.TokenLogprobs]:
        """Removes the first `num_tokens` tokens, or all if there are fewer, and returns them."""
        start, end = self._start, min(self._start + num_tokens * self._width, len(self._ids))
        encode = messages if end - start >= _MANY else _few_messages
        tokens = encode(self._ids[start:end], self._values[start:end], self._ranks[start:end], self._width)
        if self._token_bytes is not None:
            for token in tokens:
                for entry in (token.chosen, *token.top):
                    entry.bytes = self._token_bytes(entry.token_id)
        self._start = end
        # The rest moves to the front only when it is the smaller half, so that each entry moves about once.
        if 2 * end >= len(self._ids):
            del self._ids[:end], self._values[:end], self._ranks[:end]
            self._start = 0
        return tokens


def _few_messages(
    token_ids: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int], width: int
) -> list[pb.TokenLogprobs]:
    """Returns the same as `messages`."""
    entries = [
        pb.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank)
        for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True)
    ]
    return [
        pb.TokenLogprobs(chosen=entries[first], top=entries[first + 1 : first + width])
        for first in range(0, len(entries), width)
    ]


class PromptLogprobs:
    """Log-probabilities of a prompt that were not taken yet, in order of position."""

    __slots__ = ("_buffer", "_first_position", "_max_tokens")

    def __init__(self, width: int, token_bytes: Callable[[int], bytes] | None = None) -> None:
        self._buffer = LogprobBuffer(width, token_bytes)
        self._first_position = 0
        self._max_tokens = MAX_LOGPROBS // width  # in one message

    def add(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        """Appends the tokens from `first_position` on, which is where the previous ones ended."""
        if not self._buffer:
            self._first_position = first_position
        self._buffer.extend(tokens)

    def take(self) -> pb.PromptLogprobs | None:
        """Returns the next message, or None if there is nothing to send."""
        if not self._buffer:
            return None
        message = pb.PromptLogprobs(first_position=self._first_position, tokens=self._buffer.take(self._max_tokens))
        self._first_position += len(message.tokens)
        return message
