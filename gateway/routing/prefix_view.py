"""The mirror of one replica's prefix index, kept by the events that the replica publishes.

Each event, a digest that was published or forgotten, has a sequence number, from 1 on. A batch of events that does not
continue where the view ends shows that batches were lost. The view then stays as it is until a snapshot replaces it:

    apply(1, …3 events)   apply(4, …2)   [6 … 9 lost]   apply(10, …)  False   replace(14, …)   apply(15, …)
"""

from collections.abc import Iterable, Sequence

from gateway.routing.holders import HolderIndex


class PrefixView:
    """The digests that one replica holds, and those that it will hold: the prompts of requests that it was sent.

    It may be stale, which costs time but no correctness.

    index, bit       the joint index of all replicas, and the bit of this one in it
    sequence_number  number of the last event that the view contains
    """

    def __init__(self, index: HolderIndex | None = None, bit: int = 1) -> None:
        self._index = HolderIndex() if index is None else index
        self._bit = bit
        self._held: set[int] = set()
        self._expected: dict[int, int] = {}  # digest → number of requests that bring it
        self.sequence_number = 0

    def __len__(self) -> int:
        """Returns the number of digests that the replica holds."""
        return len(self._held)

    def apply(self, first_sequence_number: int, published: Iterable[int], forgotten: Iterable[int]) -> bool:
        """Applies a batch of events. Returns False, and changes nothing, if events before it are missing.

        A digest is in at most one of the two lists: a batch tells what has changed, not in which order. A batch that
        the view contains already, for example from a snapshot, is ignored.
        """
        published, forgotten = set(published), set(forgotten)
        end = first_sequence_number + len(published) + len(forgotten)
        if end <= self.sequence_number + 1:
            return True
        if first_sequence_number != self.sequence_number + 1:
            return False
        self._change(published - self._held, forgotten & self._held)
        self.sequence_number = end - 1
        return True

    def replace(self, sequence_number: int, digests: Iterable[int]) -> None:
        """Replaces what the replica holds by a snapshot that contains all events up to `sequence_number`."""
        wanted = set(digests)
        self._change(wanted - self._held, self._held - wanted)
        self.sequence_number = sequence_number

    def clear(self) -> None:
        """Forgets everything: the replica has gone, or starts again with its first event."""
        self.unexpect([digest for digest, number in self._expected.items() for _ in range(number)])
        self.replace(0, ())

    def expect(self, digests: Iterable[int]) -> None:
        """Counts the digests of a prompt as held, because the replica is about to compute them."""
        expected = self._expected
        for digest in digests:
            expected[digest] = expected.get(digest, 0) + 1
        self._index.add(digests, self._bit)

    def unexpect(self, digests: Iterable[int]) -> None:
        """Takes back what was passed to `expect`, because the request has ended."""
        expected = self._expected
        gone = []
        for digest in digests:
            expected[digest] -= 1
            if not expected[digest]:
                del expected[digest]
                if digest not in self._held:
                    gone.append(digest)
        self._index.remove(gone, self._bit)

    def num_cached(self, digests: Sequence[int]) -> int:
        """Returns the number of blocks of the longest prefix that the replica holds or will hold."""
        return self._index.longest(digests, self._bit)[1]

    def num_held(self, digests: Sequence[int]) -> int:
        """Returns the number of blocks of the longest prefix that the replica has published."""
        held = self._held
        return next((i for i, digest in enumerate(digests) if digest not in held), len(digests))

    def _change(self, added: set[int], removed: set[int]) -> None:
        self._index.add(added, self._bit)
        self._index.remove([digest for digest in removed if digest not in self._expected], self._bit)
        self._held |= added
        self._held -= removed
