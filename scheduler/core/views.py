"""Read-only pictures of the core, for people: the block map and the state of the pool. Plain data."""

from dataclasses import dataclass
from enum import Enum
from itertools import groupby, repeat

from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence

_NOT_PUBLISHED = -1
"""In the place of a number of hits."""


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class BlockRun:
    """So many blocks in a row that are alike: a pool is large, and most of it is free or holds old prefixes."""

    state: BlockState
    ref_count: int
    num_hits: int
    length: int = 1


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
    """The pool from the null block (0) to the last, in runs, and who holds what; or, as a summary, neither."""

    block_size: int
    blocks: list[BlockRun]
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

    used      hold a token, computed or planned
    wasted    the other slots of blocks that running sequences hold: reserved + internal

    The kinds of waste are those of Kwon et al., SOSP 2023, section 3.1:

    reserved  a sequence that holds them will write them later: nobody else can use them meanwhile
    internal  no sequence that holds them will ever write them: they lie between its final length and its blocks' end
    external  of free blocks, in no run long enough for the head of the queue; 0 if nobody waits, and under paging

    The final length of a sequence is taken to be max_total_tokens - 1 (the KV of its last token is never needed). One
    that ends earlier, by EOS or a stop string, leaves reserved slots unwritten: what was reserved was then internal.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_shared_blocks: int
    num_used_slots: int
    num_wasted_slots: int
    num_reserved_slots: int = 0
    num_internal_slots: int = 0
    num_external_slots: int = 0

    @property
    def waste_ratio(self) -> float:
        """Wasted over allocated slots; 0 for an empty pool."""
        num_slots = self.num_used_slots + self.num_wasted_slots
        return self.num_wasted_slots / num_slots if num_slots else 0.0


def block_map(scheduler: Scheduler, *, summary_only: bool = False) -> BlockMap:
    """Costs time in the size of the pool, unless only the summary is wanted."""
    return BlockMap(
        block_size=scheduler.cache.block_size,
        blocks=[] if summary_only else _block_runs(scheduler),
        sequences=[] if summary_only else [sequence_view(sequence) for sequence in scheduler.running_sequences()],
        num_waiting=scheduler.num_waiting,
        num_waiting_prompt_tokens=scheduler.num_waiting_prompt_tokens,
        step_id=scheduler.step_id,
        num_preemptions=scheduler.counters.num_preemptions,
        num_cow_copies=scheduler.counters.num_cow_copies,
        num_running=sum(1 for _ in scheduler.running_sequences()),
        usage=kv_usage(scheduler),
    )


def _block_runs(scheduler: Scheduler) -> list[BlockRun]:
    """Python objects for runs alone: one or two for each block took 45 ms of the event loop for 29,000 blocks."""
    pool, index = scheduler.cache.pool, scheduler.cache.index
    hits = map(index.hits.get, range(pool.num_blocks), repeat(_NOT_PUBLISHED))
    runs = []
    for (ref_count, num_hits), alike in groupby(zip(pool.ref_counts, hits, strict=True)):
        unreferenced = BlockState.FREE if num_hits == _NOT_PUBLISHED else BlockState.CACHED
        state = BlockState.ACTIVE if ref_count else unreferenced
        runs.append(BlockRun(state, ref_count, max(num_hits, 0), sum(1 for _ in alike)))
    return runs


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
    """Costs time in the blocks of running sequences; in the size of the pool only if memory is contiguous."""
    pool, index, size = scheduler.cache.pool, scheduler.cache.index, scheduler.cache.block_size
    fill: dict[int, int] = {}  # slots of a block that hold a token
    reach: dict[int, int] = {}  # of one that has others, too: slots that hold a token in the end
    for sequence in scheduler.running_sequences():
        num_planned, num_final = sequence.num_planned_tokens, sequence.params.max_total_tokens - 1
        for i, block in enumerate(sequence.block_table):
            start = i * size
            fill[block] = max(fill.get(block, 0), min(size, num_planned - start))
            if num_planned - start < size:
                reach[block] = max(reach.get(block, 0), min(size, num_final - start))
    active = set(fill).union(*scheduler.deferred_releases())
    num_cached = len(index) - sum(block in index for block in active)
    num_used = sum(fill.values())
    num_reached = sum(max(num_filled, reach.get(block, 0)) for block, num_filled in fill.items())
    return KVUsage(
        num_free_blocks=pool.num_free_blocks - num_cached,
        num_cached_blocks=num_cached,
        num_active_blocks=len(active),
        num_shared_blocks=sum(pool.ref_counts[block] > 1 for block in active),
        num_used_slots=num_used,
        num_wasted_slots=len(fill) * size - num_used,
        num_reserved_slots=num_reached - num_used,
        num_internal_slots=len(fill) * size - num_reached,
        num_external_slots=_num_external_blocks(scheduler) * size,
    )


def _num_external_blocks(scheduler: Scheduler) -> int:
    """Free blocks in runs that are too short for the head of the queue."""
    head = next(scheduler.waiting_sequences(), None)
    if head is None or not scheduler.cache.memory.is_contiguous:
        return 0
    num_wanted = scheduler.cache.run_length(head.request)
    return sum(length for length in scheduler.cache.pool.free_runs() if length < num_wanted)
