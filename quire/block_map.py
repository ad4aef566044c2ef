"""A snapshot of the server and of its block pool, as plain values."""

from dataclasses import dataclass
from enum import StrEnum


class ServerState(StrEnum):
    """What a server is doing. It takes requests while it waits for an executor; they queue."""

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
    """FREE: nothing of worth. CACHED: unreferenced, but findable by its prefix. ACTIVE: in a block table."""

    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Block:
    """One physical block; `num_hits` counts prefix lookups that found it since it was published."""

    state: BlockState
    ref_count: int
    num_hits: int


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """A sequence in its slot; logical block i lies in physical block `block_table[i]`."""

    request_id: str
    index: int
    slot: int
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The pool, block by block (entry 0 is the null block), the running sequences by slot, and the queue's depth.

    summary  the pool in numbers, as the metrics have them, of the same moment
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
        """How many usable blocks are in this state."""
        return sum(block.state is state for block in self.blocks[1:])

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one block table names."""
        return sum(block.ref_count > 1 for block in self.blocks[1:])

    @property
    def waste(self) -> "Waste":
        """How much of what sequences hold is empty: the server's own count."""
        return self.summary.waste

    @property
    def sharing(self) -> "Sharing":
        """How many blocks the running sequences would hold if none were shared, and how many they do hold."""
        tables = [[block for block in sequence.block_table if block] for sequence in self.sequences]
        return Sharing(sum(map(len, tables)), len({block for table in tables for block in table}))


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """The pool in numbers, cheap to ask for. Slots are places of one token's KV; those of a shared block count once.

    Used slots hold a token that is computed or being computed; wasted ones are the rest of the active blocks.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_shared_blocks: int
    num_used_slots: int
    num_wasted_slots: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_cow_copies: int

    @property
    def num_allocated_slots(self) -> int:
        return self.num_used_slots + self.num_wasted_slots

    @property
    def waste(self) -> "Waste":
        return Waste(self.num_allocated_slots, self.num_used_slots)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step. Times are readings of the scheduler's monotonic clock, the rest are durations the executor measured.

    queue_ns  the plan waited for the device
    idle_ns   the device had waited for the plan
    prepare_overlaps  prepare_ns went by while the device computed another step

    num_decodes are those of the sequences that computed the one token they had sampled last; a pair is a token that was
    computed and a token that it attends to, of decodes and of the others.
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
        """What the step took of the time that is not idle."""
        return self.forward_ns + self.sample_ns + (0 if self.prepare_overlaps else self.prepare_ns)


@dataclass(frozen=True, slots=True)
class Waste:
    """Slots for tokens' KV in blocks that sequences hold: how many there are, and how many of them hold a token that is
    computed or being computed.

    A shared block counts once. In a paged pool what is empty is the end of each sequence's last block.
    """

    num_allocated_slots: int
    num_used_slots: int

    @property
    def ratio(self) -> float:
        """(allocated - used) / allocated; 0 where nothing is allocated."""
        if self.num_allocated_slots == 0:
            return 0.0
        return (self.num_allocated_slots - self.num_used_slots) / self.num_allocated_slots


@dataclass(frozen=True, slots=True)
class Sharing:
    """Entries of all block tables, and the blocks that they name. Without sharing the two are equal."""

    num_table_entries: int
    num_blocks: int

    @property
    def saved_ratio(self) -> float:
        """Blocks saved over blocks without sharing (as Kwon et al., SOSP 2023, section 6.3); 0 where there are none."""
        if self.num_table_entries == 0:
            return 0.0
        return (self.num_table_entries - self.num_blocks) / self.num_table_entries
