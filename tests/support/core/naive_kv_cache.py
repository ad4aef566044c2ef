"""A slow and simple model of the KV cache in dicts and lists: the oracle of its state machine."""

from collections import Counter
from dataclasses import dataclass, field

from scheduler.core import Sequence

Contents = tuple[bytes, tuple[int, ...]]
"""The contents of one token slot: the KV of a token, given its salt and all tokens up to and including it."""


@dataclass
class NaiveKVCache:
    """The memory of an executor, the block tables, and the blocks that can be found.

    The cache under test chooses the blocks; the model follows it, and checks that each choice was allowed.
    """

    num_usable_blocks: int
    block_size: int
    tables: dict[Sequence, list[int]] = field(default_factory=dict)
    memory: dict[tuple[int, int], Contents] = field(default_factory=dict)  # by (block, offset)
    published: dict[Contents, int] = field(default_factory=dict)  # a full prefix → the block that ends it
    num_published: dict[Sequence, int] = field(default_factory=dict)  # blocks that a sequence has offered to the index
    reserved: dict[Sequence, int] = field(default_factory=dict)
    released_at: dict[int, int] = field(default_factory=dict)
    num_releases: int = 0

    def ref_counts(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    def free_blocks(self) -> set[int]:
        return set(range(1, self.num_usable_blocks + 1)) - set(self.ref_counts())

    def num_available_blocks(self, sequence: Sequence) -> int:
        others = sum(num_blocks for owner, num_blocks in self.reserved.items() if owner is not sequence)
        return len(self.free_blocks()) - others

    def num_blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns the number of new blocks that the next tokens take, a copy of a shared last block included."""
        start = sequence.num_planned_tokens
        num_blocks = -(-(start + num_tokens) // self.block_size)
        return num_blocks - len(self.tables[sequence]) + self.writes_to_shared_block(sequence)

    def writes_to_shared_block(self, sequence: Sequence) -> bool:
        is_partial = sequence.num_planned_tokens % self.block_size > 0
        return is_partial and self.ref_counts()[self.tables[sequence][-1]] > 1

    def contents(self, sequence: Sequence, num_tokens: int) -> Contents:
        return sequence.request.cache_salt, tuple(sequence.token_ids[:num_tokens])

    def longest_prefix(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = []
        for end in range(self.block_size, sequence.num_tokens, self.block_size):
            block = self.published.get(self.contents(sequence, end))
            if block is None:
                break
            blocks.append(block)
        return blocks

    # --- moves ------------------------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence, prefix: list[int]) -> None:
        self.tables[sequence] = list(prefix)
        self.num_published[sequence] = len(prefix)
        self.reserved[sequence] = 0

    def take(self, sequence: Sequence, logical: int, block: int) -> None:
        """Called when the cache gave this block to a sequence as logical block `logical`."""
        free = self.free_blocks()
        assert block in free, f"block {block} was given out while in use"
        findable = set(self.published.values())
        if block in findable:
            assert free <= findable, f"block {block} was overwritten, though {free - findable} hold nothing"
            oldest = min(free, key=lambda candidate: self.released_at[candidate])
            assert block == oldest, f"block {block} was overwritten before block {oldest}, which is older"
        self.published = {contents: owner for contents, owner in self.published.items() if owner != block}
        self.tables[sequence][logical:] = [block]
        self.reserved[sequence] = max(0, self.reserved[sequence] - 1)

    def copy(self, source: int, destination: int) -> None:
        for offset in range(self.block_size):
            if (source, offset) in self.memory:
                self.memory[destination, offset] = self.memory[source, offset]

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        for position in range(sequence.num_planned_tokens, sequence.num_planned_tokens + num_tokens):
            logical, offset = divmod(position, self.block_size)
            block = self.tables[sequence][logical]
            assert self.ref_counts()[block] == 1, f"I3: a write to block {block}, which is shared"
            assert block not in self.published.values(), f"I3: a write to block {block}, which is published"
            self.memory[block, offset] = self.contents(sequence, position + 1)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.tables[child] = list(self.tables[parent])
        self.num_published[child] = self.num_published[parent]
        self.reserved[child] = 0

    def publish(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed_tokens // self.block_size
        for logical in range(self.num_published[sequence], num_full):
            contents = self.contents(sequence, (logical + 1) * self.block_size)
            block = self.tables[sequence][logical]
            if contents not in self.published and block not in self.published.values():
                self.published[contents] = block
        self.num_published[sequence] = max(self.num_published[sequence], num_full)

    def release(self, sequence: Sequence) -> None:
        del self.reserved[sequence], self.num_published[sequence]
        for block in reversed(self.tables.pop(sequence)):
            self.num_releases += 1
            self.released_at[block] = self.num_releases

    def forget_prefixes(self) -> int:
        free, before = self.free_blocks(), len(self.published)
        self.published = {contents: block for contents, block in self.published.items() if block not in free}
        return before - len(self.published)

    # --- what must hold ---------------------------------------------------------------------------------------

    def assert_readable(self, sequence: Sequence) -> None:
        """Checks that the KV of every planned token is where the block table says."""
        for position in range(sequence.num_planned_tokens):
            logical, offset = divmod(position, self.block_size)
            block = self.tables[sequence][logical]
            assert self.memory.get((block, offset)) == self.contents(sequence, position + 1)
