"""The tokens of a sequence and how often each is in its output, as penalties need them."""

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Floats, Ints

_MIN_CAPACITY = 32


class TokenCounts:
    """The distinct tokens of a sequence, with counts. Read once at admission, then extended token by token.

    ids[n] int64       the distinct tokens of prompt and output, in no particular order
    num_output[n]      how often each is in the output, 0 for tokens of the prompt alone; float32, as it is multiplied
    """

    __slots__ = ("_ids", "_num_output", "_places")

    def __init__(self, token_ids: Ints, num_prompt_tokens: int) -> None:
        ids = np.unique(token_ids)
        output_ids, counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        self._ids = np.zeros(max(_MIN_CAPACITY, 2 * len(ids)), dtype=np.int64)
        self._ids[: len(ids)] = ids
        self._num_output = np.zeros(len(self._ids), dtype=np.float32)
        self._num_output[np.searchsorted(ids, output_ids)] = counts
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def num_output(self) -> Floats:
        return self._num_output[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Adds a token to the output."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._num_output = np.concatenate((self._num_output, np.zeros_like(self._num_output)))
        self._ids[place] = token_id
        self._num_output[place] += 1

    def copy(self) -> "TokenCounts":
        other = TokenCounts.__new__(TokenCounts)
        other._ids, other._num_output = self._ids.copy(), self._num_output.copy()
        other._places = self._places.copy()
        return other
