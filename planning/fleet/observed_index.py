"""The shipped prefix index, and what changes in it, as a replica publishes it."""

from scheduler.core.prefix_index import PrefixIndex


class ObservedIndex(PrefixIndex):
    """Collects the digests that were published or forgotten since the last `take_changes`, each in its short form.

    A digest that came and went in between is in neither list.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def publish(self, block: int, digest: bytes) -> None:
        num_before = len(self)
        super().publish(block, digest)
        if len(self) > num_before:
            _move(short_digest(digest), self._removed, self._added)

    def forget(self, block: int) -> None:
        digest = self._digest_by_block.get(block)
        super().forget(block)
        if digest is not None:
            _move(short_digest(digest), self._added, self._removed)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Returns the digests that were published and forgotten."""
        changes = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return changes


def _move(digest: int, undone: dict[int, None], done: dict[int, None]) -> None:
    if digest in undone:
        del undone[digest]
    else:
        done[digest] = None


def short_digest(digest: bytes) -> int:
    """Returns the first 8 bytes of a digest as a number: enough for a choice, which may be wrong."""
    return int.from_bytes(digest[:8])
