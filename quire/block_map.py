"""Snapshots of the server and of its block pool, as plain values."""

from dataclasses import dataclass
from enum import StrEnum


class ServerState(StrEnum):
    """The state of a server. While it waits for an executor, it accepts requests and queues them."""

    WAITING_FOR_EXECUTOR = "waiting_for_executor"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's model and limits. Model and pool are empty or 0 until an executor has described them.

    num_blocks  blocks that sequences can use; the null block is not counted
    """

    version: str
    model_name: str
    dtype: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    state: ServerState


class BlockState(StrEnum):
    """A block is FREE (empty), CACHED (in no block table, but found by its prefix) or ACTIVE (in a block table)."""

    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Block:
    """A physical block. `num_hits` counts the prefix lookups that found it since it was published."""

    state: BlockState
    ref_count: int
    num_hits: int


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """A running sequence and its slot in the batch. Its logical block i is the physical block `block_table[i]`."""

    request_id: str
    index: int
    slot: int
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    block_table: tuple[int, ...]

    @property
    def prefill_share(self) -> float | None:
        """The share of its known tokens that is computed, or None if no more than the newest one is missing."""
        return self.num_computed_tokens / self.num_tokens if self.num_computed_tokens < self.num_tokens - 1 else None


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The pool block by block (entry 0 is the null block), the running sequences by slot, and the depth of the queue.

    summary  the same pool at the same moment, in the numbers of the metrics
    """

    block_size: int
    blocks: tuple[Block, ...]
    sequences: tuple[RunningSequence, ...]
    num_waiting: int
    num_waiting_prompt_tokens: int
    step_id: int
    num_preemptions: int
    num_cow_copies: int
    summary: "PoolSummary"

    def num_blocks(self, state: BlockState) -> int:
        """Number of usable blocks in this state."""
        return sum(block.state is state for block in self.blocks[1:])

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one block table names."""
        return sum(block.ref_count > 1 for block in self.blocks[1:])

    @property
    def waste(self) -> "Waste":
        """The server's count of allocated and used token slots."""
        return self.summary.waste

    @property
    def sharing(self) -> "Sharing":
        """Counts the blocks that the running sequences would hold without sharing, and those that they hold."""
        tables = [[block for block in sequence.block_table if block] for sequence in self.sequences]
        return Sharing(sum(map(len, tables)), len({block for table in tables for block in table}))


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """The pool in numbers, cheaper to request than a block map.

    A token slot holds the KV of one token; those of a shared block count once. Used token slots hold a token that is
    computed or being computed. Wasted token slots are the rest of the active blocks.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_shared_blocks: int
    num_used_token_slots: int
    num_wasted_token_slots: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_cow_copies: int

    @property
    def num_allocated_token_slots(self) -> int:
        return self.num_used_token_slots + self.num_wasted_token_slots

    @property
    def waste(self) -> "Waste":
        return Waste(self.num_allocated_token_slots, self.num_used_token_slots)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step: four times of the scheduler's monotonic clock, and durations that the executor measured.

    queue_ns           time that the plan waited for the device
    idle_ns            time that the device waited for the plan
    prepare_overlaps   prepare_ns passed while the device computed another step
    num_decodes        sequences that computed one token, the last one sampled
    num_decode_pairs   pairs of a computed token and a token that it attends to, in decodes
    num_prefill_pairs  the same in the other sequences
    """

    epoch: int
    step_id: int
    num_sequences: int
    num_tokens: int
    planned_ns: int
    sent_ns: int
    received_ns: int
    committed_ns: int
    queue_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    idle_ns: int
    num_decodes: int = 0
    num_decode_pairs: int = 0
    num_prefill_pairs: int = 0
    prepare_overlaps: bool = False

    @property
    def busy_ns(self) -> int:
        """Time that the device spent on the step."""
        return self.forward_ns + self.sample_ns + (0 if self.prepare_overlaps else self.prepare_ns)


@dataclass(frozen=True, slots=True)
class Waste:
    """The token slots of the blocks that sequences hold, and those of them with a token computed or being computed.

    A shared block counts once. In a paged pool, only the end of each sequence's last block is unused.
    """

    num_allocated_token_slots: int
    num_used_token_slots: int

    @property
    def ratio(self) -> float:
        """Ratio (allocated - used) / allocated; 0 if nothing is allocated."""
        if self.num_allocated_token_slots == 0:
            return 0.0
        return (self.num_allocated_token_slots - self.num_used_token_slots) / self.num_allocated_token_slots


@dataclass(frozen=True, slots=True)
class Sharing:
    """The entries of all block tables, and the blocks that they name. The numbers are equal if no block is shared."""

    num_table_entries: int
    num_blocks: int

    @property
    def saved_ratio(self) -> float:
        """Ratio of blocks saved to blocks without sharing (Kwon et al., SOSP 2023, section 6.3); 0 without blocks."""
        if self.num_table_entries == 0:
            return 0.0
        return (self.num_table_entries - self.num_blocks) / self.num_table_entries
