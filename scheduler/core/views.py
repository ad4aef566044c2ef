"""Read-only pictures of the core, for people: the block map and the state of the pool. Plain data."""

from dataclasses import dataclass
from enum import Enum

from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class BlockView:
    state: BlockState
    ref_count: int
    num_hits: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    request_id: int
    index: int
    slot: int  # -1: its last step is in flight
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The pool block by block (index 0 is the null block), and who holds what; or, as a summary, neither."""

    block_size: int
    blocks: list[BlockView]
    sequences: list[SequenceView]
    num_waiting: int
    num_waiting_prompt_tokens: int
    step_id: int
    num_preemptions: int
    num_cow_copies: int
    num_running: int
    usage: "KVUsage"


@dataclass(frozen=True, slots=True)
class KVUsage:
    """The pool in numbers. Slots are places for one token; a shared block's slots count once.

    wasted slots are those in active blocks that no computed or planned token fills: internal fragmentation, the
    only kind there is.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_shared_blocks: int
    num_used_slots: int
    num_wasted_slots: int

    @property
    def waste_ratio(self) -> float:
        """Wasted over allocated slots; 0 for an empty pool."""
        num_slots = self.num_used_slots + self.num_wasted_slots
        return self.num_wasted_slots / num_slots if num_slots else 0.0


def block_map(scheduler: Scheduler, *, summary_only: bool = False) -> BlockMap:
    """Costs time in the size of the pool, unless only the summary is wanted."""
    return BlockMap(
        block_size=scheduler.cache.block_size,
        blocks=[] if summary_only else _block_views(scheduler),
        sequences=[] if summary_only else [sequence_view(sequence) for sequence in scheduler.running_sequences()],
        num_waiting=scheduler.num_waiting,
        num_waiting_prompt_tokens=scheduler.num_waiting_prompt_tokens,
        step_id=scheduler.step_id,
        num_preemptions=scheduler.counters.num_preemptions,
        num_cow_copies=scheduler.counters.num_cow_copies,
        num_running=sum(1 for _ in scheduler.running_sequences()),
        usage=kv_usage(scheduler),
    )


def _block_views(scheduler: Scheduler) -> list[BlockView]:
    pool, index = scheduler.cache.pool, scheduler.cache.index
    blocks = []
    for block, ref_count in enumerate(pool.ref_counts):
        cached = BlockState.CACHED if block in index else BlockState.FREE
        blocks.append(BlockView(BlockState.ACTIVE if ref_count else cached, ref_count, index.num_hits(block)))
    return blocks


def sequence_view(sequence: Sequence) -> SequenceView:
    """Of a running sequence."""
    return SequenceView(
        request_id=sequence.request.request_id,
        index=sequence.index,
        slot=sequence.slot,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_table=tuple(sequence.block_table),
    )


def kv_usage(scheduler: Scheduler) -> KVUsage:
    """Costs time in the blocks of running sequences, not in the size of the pool."""
    pool, index, size = scheduler.cache.pool, scheduler.cache.index, scheduler.cache.block_size
    fill: dict[int, int] = {}
    for sequence in scheduler.running_sequences():
        table = sequence.block_table
        for i, block in enumerate(table):
            num_filled = min(size, sequence.num_planned_tokens - i * size)
            fill[block] = max(fill.get(block, 0), num_filled)
    active = set(fill).union(*scheduler.deferred_releases())
    num_cached = len(index) - sum(block in index for block in active)
    num_used = sum(fill.values())
    return KVUsage(
        num_free_blocks=pool.num_free_blocks - num_cached,
        num_cached_blocks=num_cached,
        num_active_blocks=len(active),
        num_shared_blocks=sum(pool.ref_counts[block] > 1 for block in active),
        num_used_slots=num_used,
        num_wasted_slots=len(fill) * size - num_used,
    )
