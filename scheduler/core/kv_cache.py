"""Records which sequence holds which block of KV memory. The memory itself belongs to the executor.

Tokens lie in blocks of `block_size`. Logical block i of a sequence holds its tokens [i * block_size, …) and lies in
physical block `block_table[i]`:

    token_ids     │ 0 … 15 │ 16 … 31 │ 32 … 40 ┊      │      block_size 16, 41 tokens
    block_table   │    7   │     3   │    12   ┊      │
                                               └ write_limit 48, if block 12 is this sequence's own

The idea is that of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023: virtual memory in which blocks are the pages and sequences are the processes.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler.core.block_pool import BlockPool
from scheduler.core.prefix_index import PrefixIndex
from scheduler.core.request import Request
from scheduler.core.sequence import Sequence

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Allocation:
    """Changes to send to the executor: table entries (logical block, physical block), and at most one block to copy."""

    table_updates: tuple[tuple[int, int], ...] = ()
    block_copy: tuple[int, int] | None = None


class KVCache:
    """The block pool, the prefix index and the block tables of all sequences, kept consistent.

    Blocks can be *reserved*: promised to one sequence and not yet taken. No other sequence gets them.

    watermark_ratio  share of the pool to leave free when a sequence is admitted beside others, for their growth
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        namespace: str = "",
        enable_prefix_caching: bool = True,
        watermark_ratio: float = 0.0,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, namespace)
        self.num_reserved_blocks = 0
        self.num_watermark_blocks = int(watermark_ratio * num_blocks)
        self._enable_prefix_caching = enable_prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_available_blocks(self, sequence: Sequence | None = None) -> int:
        """Returns the number of free blocks that are not promised to a sequence other than this one."""
        own = sequence.leader.num_reserved_blocks if sequence else 0
        return self.pool.num_free_blocks - self.num_reserved_blocks + own

    def check_fits(self, request: Request) -> None:
        """Raises CapacityExceeded if this kind of cache cannot hold the request. A paged cache holds any request."""

    # --- admission --------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the published blocks that hold the longest prefix of this sequence.

        Leaves at least one token to compute, because the logits of the last one are needed. Changes only the digests
        that the sequence keeps.
        """
        if self.reads_prefixes(sequence):
            self._extend_chain(sequence, (sequence.num_tokens - 1) // self.block_size)
        return self.index.longest_match(self.shareable_digests(sequence))

    def shareable_digests(self, sequence: Sequence) -> list[bytes]:
        """Returns the digests of the blocks that this sequence can share, as far as they are known."""
        return sequence.digests[: (sequence.num_tokens - 1) // self.block_size] if self.reads_prefixes(sequence) else []

    def reads_prefixes(self, sequence: Sequence) -> bool:
        """Returns whether a sequence uses prefix hits. Requests for prompt log-probabilities compute their prompt."""
        return self._enable_prefix_caching and not sequence.params.num_prompt_logprobs

    def is_computing(self, sequence: Sequence, num_blocks: int, digest: bytes) -> bool:
        """Returns whether a running sequence will publish this digest as its logical block `num_blocks`."""
        if not self._enable_prefix_caching or sequence.num_tokens < (num_blocks + 1) * self.block_size:
            return False
        return self._extend_chain(sequence, num_blocks + 1)[num_blocks] == digest

    def num_blocks_to_admit(self, sequence: Sequence, prefix: list[int], num_promised: int = 0) -> int:
        """Returns the number of free blocks needed to hold all known tokens, or `num_promised` blocks if that is more.

        The blocks of `prefix` are shared. Those that no sequence holds are counted too, because they stop being free.
        """
        num_revived = sum(self.pool.ref_counts[block] == 0 for block in prefix)
        num_held = max(self.num_blocks_for(sequence.num_tokens), num_promised)
        return num_held - len(prefix) + num_revived

    def num_blocks_to_prefill(self, sequence: Sequence) -> int:
        """Returns the number of free blocks needed to compute all known tokens, beyond those held or promised."""
        num_held = len(sequence.block_table) + sequence.leader.num_reserved_blocks
        return max(0, self.num_blocks_for(sequence.num_tokens) - num_held)

    def can_admit(self, sequence: Sequence, num_blocks: int) -> bool:
        """Returns whether a sequence that takes `num_blocks` free blocks in all can be admitted."""
        return num_blocks <= self.num_available_blocks()

    def adopt(self, sequence: Sequence, prefix: list[int]) -> None:
        """Starts a sequence's block table with the blocks that `find_prefix` found."""
        for block in prefix:
            self.pool.retain(block)
        self.index.count_hits(prefix)
        sequence.block_table = list(prefix)
        num_tokens = len(prefix) * self.block_size
        sequence.num_computed_tokens = sequence.num_planned_tokens = sequence.write_limit = num_tokens
        sequence.publish_at = num_tokens + self.block_size if self._enable_prefix_caching else NEVER

    # --- writing ----------------------------------------------------------------------------------------------

    def num_blocks_to_append(self, sequences: Iterable[Sequence]) -> int:
        """Returns the number of free blocks needed for one more token of each sequence, all at their write limits."""
        num_needed = 0
        shared: dict[int, int] = {}
        for sequence in sequences:
            if sequence.num_planned_tokens % self.block_size == 0:
                num_needed += 1
                continue
            block = sequence.block_table[-1]
            num_refs = shared.get(block, self.pool.ref_counts[block])
            if num_refs > 1:
                num_needed += 1
                shared[block] = num_refs - 1
        return num_needed

    def try_allocate(self, sequence: Sequence, num_tokens: int) -> Allocation | None:
        """Makes the next `num_tokens` tokens of a sequence writable. Returns None and changes nothing if it cannot.

        A partly filled last block that other tables share is not written. A new block takes its place in this table,
        and the contents have to be copied before the step writes (copy-on-write). The last sequence that holds the
        shared block writes to it in place.
        """
        start, size = sequence.num_planned_tokens, self.block_size
        table = sequence.block_table
        num_new = self.num_blocks_for(start + num_tokens) - len(table)
        copies = start % size != 0 and self.pool.ref_counts[table[-1]] > 1
        if num_new + copies > self.num_available_blocks(sequence):
            return None

        updates: list[tuple[int, int]] = []
        block_copy = None
        if copies:
            source, destination = table[-1], self._take(sequence)
            block_copy = (source, destination)
            self.release([source])
            table[-1] = destination
            updates.append((len(table) - 1, destination))
        for _ in range(num_new):
            updates.append((len(table), block := self._take(sequence)))
            table.append(block)
        sequence.write_limit = len(table) * size
        return Allocation(tuple(updates), block_copy)

    def append_block(self, sequence: Sequence) -> None:
        """Appends one block, which must be free. Only for a sequence whose last block is full, or that has none."""
        sequence.block_table.append(self._take(sequence))
        sequence.write_limit += self.block_size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares all blocks of the parent with the child, the partly filled last one included. Copies nothing."""
        for block in parent.block_table:
            self.pool.retain(block)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_planned_tokens = parent.num_planned_tokens
        child.digests = list(parent.digests)
        child.publish_at = parent.publish_at
        parent.write_limit = child.write_limit = parent.num_planned_tokens

    # --- publishing and releasing -----------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Adds full blocks to the prefix index. Called when the result of the step that wrote them is committed."""
        num_full = sequence.num_computed_tokens // self.block_size
        num_known = sequence.publish_at // self.block_size - 1
        chain = self._extend_chain(sequence, num_full)
        for i in range(num_known, num_full):
            self.index.publish(sequence.block_table[i], chain[i])
        sequence.publish_at = (num_full + 1) * self.block_size

    def release(self, block_table: list[int]) -> None:
        """Releases blocks, last to first, so that the first blocks of prefixes stay cached longest."""
        for block in reversed(block_table):
            self.pool.release(block, findable=block in self.index)

    def forget_prefixes(self) -> int:
        """Removes the blocks that no sequence uses from the prefix index; returns their number."""
        cached = [block for block in self.pool.free_blocks() if block in self.index]
        self.withdraw(cached)
        return len(cached)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Removes blocks from the prefix index whose KV shall not be found any more, or is not right."""
        for block in blocks:
            self.index.withdraw(block)

    def restore(self, retained: SequenceOf[tuple[int, bytes]]) -> None:
        """Makes the blocks that the executor has retained findable, in a cache that is empty.

        They are in the order of publication. The last one is reused first, because a block was always published before
        those that continue it: so no block stays cached that cannot be found.
        """
        if self._enable_prefix_caching:
            for block, digest in retained:
                self.index.publish(block, digest)
            for block, _ in reversed(retained):
                self.pool.keep_longest(block)
            self.index.is_shared = True
            self.index.withdrawn = [block for block, _ in retained if block not in self.index]

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        """Promises free blocks to a sequence. `try_allocate` uses them; `cancel_reservation` gives up the rest."""
        sequence.num_reserved_blocks += num_blocks
        self.num_reserved_blocks += num_blocks

    def cancel_reservation(self, sequence: Sequence) -> None:
        self.num_reserved_blocks -= sequence.num_reserved_blocks
        sequence.num_reserved_blocks = 0

    def _extend_chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        return self.index.extend_chain(sequence.digests, sequence.token_ids, num_blocks, sequence.request.cache_salt)

    def _take(self, sequence: Sequence) -> int:
        block = self.pool.take()
        self.index.forget(block)
        if sequence.leader.num_reserved_blocks:
            sequence.leader.num_reserved_blocks -= 1
            self.num_reserved_blocks -= 1
        return block
