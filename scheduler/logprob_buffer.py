"""Log-probabilities on their way to a reader that may be slow: numbers in arrays, messages only when they are taken.

A token of k most probable ones is 12 · (k + 1) bytes here; as Python objects it would be ten times that.
"""

from array import array
from collections.abc import Sequence

from quire.v1 import generation_pb2 as wire
from scheduler.core import TokenLogprobs


class LogprobBuffer:
    """First in, first out. `width` is how many entries each token has: its own, then those of the most probable."""

    __slots__ = ("_ids", "_ranks", "_values", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._ids = array("I")
        self._values = array("f")
        self._ranks = array("I")

    def __len__(self) -> int:
        """Tokens."""
        return len(self._ids) // self._width

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
        end = num_tokens * self._width
        entries = [
            wire.TokenLogprob(token_id=token_id, logprob=value, rank=rank)
            for token_id, value, rank in zip(self._ids[:end], self._values[:end], self._ranks[:end], strict=True)
        ]
        del self._ids[:end], self._values[:end], self._ranks[:end]
        return [
            wire.TokenLogprobs(chosen=entries[first], top=entries[first + 1 : first + self._width])
            for first in range(0, len(entries), self._width)
        ]
