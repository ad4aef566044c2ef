"""Finds the replicas that hold the longest prefix of a prompt.

An inverted index: for each digest of a block a set of replicas, kept as the bits of an integer. Intersecting the sets
of a prompt's digests takes a few words of memory for each block, even for a thousand replicas.
"""

from collections.abc import Iterable, Sequence


class HolderIndex:
    """Maps digests to the replicas that hold them. A replica is a bit: 1 << its number."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns the number of digests that some replica holds."""
        return len(self._holders)

    def add(self, digests: Iterable[int], bit: int) -> None:
        holders = self._holders
        for digest in digests:
            held = holders.setdefault(digest, bit)
            if not held & bit:
                holders[digest] = held | bit

    def remove(self, digests: Iterable[int], bit: int) -> None:
        """Removes a replica from the holders of these digests, all of which it holds."""
        holders = self._holders
        for digest in digests:
            left = holders[digest] ^ bit
            if left:
                holders[digest] = left
            else:
                del holders[digest]

    def longest(self, digests: Sequence[int], among: int) -> tuple[int, int]:
        """Returns the replicas of `among` that hold the longest prefix, and its number of blocks.

        No replica and 0 if none holds the first block. Takes time proportional to the blocks of that prefix.
        """
        get = self._holders.get
        found, num_blocks = 0, 0
        left = among
        for digest in digests:
            left &= get(digest, 0)
            if not left:
                break
            found = left
            num_blocks += 1
        return found, num_blocks
