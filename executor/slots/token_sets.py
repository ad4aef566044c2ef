"""A small set of token ids for each slot, searchable for all slots at once."""

import numpy as np
from numpy.typing import NDArray

from executor.plans.plan import Ints

_NOTHING = -1


class TokenSets:
    """A matrix of token ids, padded with -1, which is not a token id. It is as wide as the largest set so far."""

    def __init__(self, num_rows: int) -> None:
        self._ids = np.full((num_rows, 1), _NOTHING, dtype=np.int32)

    def set(self, row: int, token_ids: Ints) -> None:
        if (missing := len(token_ids) - self._ids.shape[1]) > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, missing)), constant_values=_NOTHING)
        self._ids[row] = _NOTHING
        self._ids[row, : len(token_ids)] = token_ids

    def copy_rows(self, sources: Ints, destinations: Ints) -> None:
        """Copies all rows at once: a row may be both a source and a destination."""
        self._ids[destinations] = self._ids[sources]

    def get(self, row: int) -> Ints:
        ids: Ints = self._ids[row]
        present: Ints = ids[ids != _NOTHING]
        return present

    def contain(self, rows: Ints, token_ids: Ints) -> NDArray[np.bool_]:
        """Returns for each pair whether the set of the row has the token id."""
        found: NDArray[np.bool_] = np.any(self._ids[rows] == token_ids[:, None], axis=1)
        return found

    def clear(self) -> None:
        self._ids = np.full((len(self._ids), 1), _NOTHING, dtype=np.int32)
