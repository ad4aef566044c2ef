"""Log-probabilities on their way to a reader that may be slow: numbers in arrays, messages only when they are taken.

A token of k most probable ones is 12 · (k + 1) bytes here; as Python objects it would be ten times that.
"""

from array import array
from collections.abc import Sequence

from quire.v1 import generation_pb2 as wire
from scheduler.core import TokenLogprobs

MAX_LOGPROBS = 2048
"""In a message. To make one takes some 2 µs, in which nobody else gets a token: 5 ms for a full message."""


class LogprobBuffer:
    """First in, first out. `width` is how many entries each token has: its own, then those of the most probable."""

    __slots__ = ("_ids", "_ranks", "_start", "_values", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._start = 0  # entries before it were taken
        self._ids = array("I")
        self._values = array("f")
        self._ranks = array("I")

    def __len__(self) -> int:
        """Tokens."""
        return (len(self._ids) - self._start) // self._width

    def extend(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Raises ValueError for a token that has not `width` entries."""
        for token in tokens:
            if not len(token.token_ids) == len(token.values) == len(token.ranks) == self._width:
                raise ValueError(f"log-probabilities of {len(token.token_ids)} tokens, expected {self._width}")
            self._ids.extend(token.token_ids)
            self._values.extend(token.values)
            self._ranks.extend(token.ranks)

    def take(self, num_tokens: int) -> list[wire.TokenLogprobs]:
        """The first so many; they are in the buffer no more."""
        start, end = self._start, min(self._start + num_tokens * self._width, len(self._ids))
        entries = [
            wire.TokenLogprob(token_id=token_id, logprob=value, rank=rank)
            for token_id, value, rank in zip(
                self._ids[start:end], self._values[start:end], self._ranks[start:end], strict=True
            )
        ]
        self._start = end
        if 2 * end >= len(
            self._ids
        ):  # what is left moves to the front: each entry once, however many messages there are
            del self._ids[:end], self._values[:end], self._ranks[:end]
            self._start = 0
        return [
            wire.TokenLogprobs(chosen=entries[first], top=entries[first + 1 : first + self._width])
            for first in range(0, len(entries), self._width)
        ]


class PromptLogprobs:
    """Those of a prompt that have not been taken, in order of position."""

    __slots__ = ("_buffer", "_first_position", "_most")

    def __init__(self, width: int) -> None:
        self._buffer = LogprobBuffer(width)
        self._first_position = 0
        self._most = MAX_LOGPROBS // width

    def add(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        if not self._buffer:
            self._first_position = first_position
        self._buffer.extend(tokens)

    def take(self) -> wire.PromptLogprobs | None:
        if not self._buffer:
            return None
        message = wire.PromptLogprobs(first_position=self._first_position, tokens=self._buffer.take(self._most))
        self._first_position += len(message.tokens)
        return message
