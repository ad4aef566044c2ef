"""Counts losses of executors by what clients have received, apart from the scheduler's own count (I16)."""

from collections import defaultdict
from itertools import pairwise

Key = tuple[int, int]


class LossRecord:
    """The number of tokens that each sequence had received at each loss of an executor that it ran on."""

    def __init__(self) -> None:
        self._lengths = defaultdict[Key, list[int]](list)

    def lost(self, key: Key, num_received: int) -> None:
        self._lengths[key].append(num_received)

    def num_in_a_row(self, key: Key) -> int:
        """Returns the number of the latest losses with at most one new token between each two of them."""
        lengths = self._lengths[key]
        number = min(1, len(lengths))
        for earlier, later in reversed(list(pairwise(lengths))):
            if later > earlier + 1:
                break
            number += 1
        return number

    def is_suspect(self, key: Key, num_received: int) -> bool:
        return self.num_in_a_row(key) >= 2 and num_received <= self._lengths[key][-1] + 1
