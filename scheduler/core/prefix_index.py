"""Finds blocks by their contents: a hash chain over full blocks.

The digest of a block covers its own tokens and, through its parent's digest, every token before it. So one lookup
shows whether the KV of the whole prefix is in the pool, and equal digests mean equal KV.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b


class PrefixIndex:
    """A one-to-one map between digests and blocks. `hits` counts how often lookups found each published block.

    The hash is wide, so that no client can construct a collision with another client's prompt.

    An executor that retains blocks has to know them as well. `published` and `withdrawn` are what the next plan tells
    it; they stay empty for other executors (`is_shared` is False). `on_change` is called with each digest that is
    published (True) or forgotten (False), from now on.
    """

    DIGEST_BYTES = 32
    SCHEME = "blake2b chain 1"
    """The name of the way in which `extend_chain` makes digests. It changes whenever digests do."""

    def __init__(self, block_size: int, namespace: str = "") -> None:
        self.block_size = block_size
        self.namespace = namespace
        self.on_change: Callable[[bytes, bool], object] = lambda digest, is_published: None
        self._block_by_digest: dict[bytes, int] = {}
        self._digest_by_block: dict[int, bytes] = {}
        self.hits: dict[int, int] = {}
        self.is_shared = False
        self.published: dict[int, bytes] = {}
        self.withdrawn: list[int] = []

    def __len__(self) -> int:
        return len(self._block_by_digest)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_by_block

    def items(self) -> list[tuple[bytes, int]]:
        return list(self._block_by_digest.items())

    def extend_chain(
        self, chain: list[bytes], token_ids: SequenceOf[int], num_full_blocks: int, salt: bytes
    ) -> list[bytes]:
        """Extends a sequence's digests in place to at least `num_full_blocks`; returns the chain."""
        size = self.block_size
        parent = chain[-1] if chain else self._root(salt)
        data = array("I", token_ids[len(chain) * size : num_full_blocks * size]).tobytes()
        for start in range(0, len(data), 4 * size):
            parent = blake2b(parent + data[start : start + 4 * size], digest_size=self.DIGEST_BYTES).digest()
            chain.append(parent)
        return chain

    def longest_match(self, chain: SequenceOf[bytes]) -> list[int]:
        """Returns the blocks that hold the longest published prefix of `chain`."""
        blocks: list[int] = []
        for digest in chain:
            block = self._block_by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_hits(self, blocks: SequenceOf[int]) -> None:
        for block in blocks:
            self.hits[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a block findable. If another block with the same contents is published already, that one stays."""
        if digest not in self._block_by_digest and block not in self._digest_by_block:
            self._block_by_digest[digest] = block
            self._digest_by_block[block] = digest
            self.hits[block] = 0
            self.on_change(digest, True)
            if self.is_shared:
                self.published[block] = digest

    def forget(self, block: int) -> None:
        """Removes a block that is about to be overwritten. An unpublished block is no error."""
        digest = self._digest_by_block.pop(block, None)
        if digest is not None:
            del self._block_by_digest[digest]
            del self.hits[block]
            self.published.pop(block, None)
            self.on_change(digest, False)

    def withdraw(self, block: int) -> None:
        """Removes a block that is not overwritten, so that the executor has to be told. It need not be published."""
        if self.is_shared and block in self and block not in self.published:
            self.withdrawn.append(block)
        self.forget(block)

    @property
    def has_news(self) -> bool:
        return bool(self.published or self.withdrawn)

    def take_news(self) -> tuple[dict[int, bytes], list[int]]:
        """Returns what was published and what was withdrawn since the last call."""
        news = self.published, self.withdrawn
        self.published, self.withdrawn = {}, []
        return news

    def _root(self, salt: bytes) -> bytes:
        return blake2b(salt, key=blake2b(self.namespace.encode()).digest(), digest_size=self.DIGEST_BYTES).digest()
