"""Read-only views of the core for people: the block map and the state of the pool, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby, repeat

from scheduler.core.baselines.contiguous import ContiguousKVCache
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence
from scheduler.core.state import SchedulerState

_NOT_PUBLISHED = -1
"""Replaces the number of hits of a block that is not published."""


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A run of `length` consecutive blocks that are alike. Most of a large pool is free or holds old prefixes."""

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
    """The pool from the null block (0) to the last, in runs, and the running sequences. A summary has neither."""

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
    """The pool in numbers. A token slot is a place for one token; the token slots of a shared block count once.

    used      token slots that hold a token, computed or planned
    wasted    the other token slots of blocks that running sequences hold: reserved + internal

    The kinds of waste are those of Kwon et al., SOSP 2023, section 3.1:

    reserved  a sequence that holds them will write them later; until then no other sequence can use them
    internal  no sequence that holds them will ever write them: they lie between its final length and its blocks' end
    external  free, but in no run long enough for the head of the queue; 0 if no request waits, and under paging

    The final length of a sequence is assumed to be max_total_tokens - 1 (the KV of its last token is never needed). A
    sequence that ends earlier, by EOS or a stop string, never writes its reserved token slots; they count as reserved
    all the same.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_shared_blocks: int
    num_used_token_slots: int
    num_wasted_token_slots: int
    num_reserved_token_slots: int = 0
    num_internal_token_slots: int = 0
    num_external_token_slots: int = 0

    @property
    def waste_ratio(self) -> float:
        """Wasted over allocated token slots; 0 for an empty pool."""
        num_token_slots = self.num_used_token_slots + self.num_wasted_token_slots
        return self.num_wasted_token_slots / num_token_slots if num_token_slots else 0.0


def num_waiting_sequences(scheduler: Scheduler) -> int:
    """Returns the number of waiting sequences: those in the queue, and deferred ones that pause."""
    return len(scheduler.state.waiting) + len(scheduler.state.waiting.paused)


def num_waiting_prompt_tokens(scheduler: Scheduler) -> int:
    """Returns the tokens of prompts, and of outputs that are resumed, of all waiting sequences: also of deferred ones
    that pause, which are not in the queue."""
    queue = scheduler.state.waiting
    return queue.num_prompt_tokens + sum(sequence.num_given_tokens for sequence in queue.paused)


def block_map(scheduler: Scheduler, *, summary_only: bool = False) -> BlockMap:
    """Returns the block map. Takes time proportional to the size of the pool, unless only the summary is wanted."""
    state = scheduler.state
    return BlockMap(
        block_size=state.cache.block_size,
        blocks=[] if summary_only else _block_runs(state),
        sequences=[] if summary_only else [sequence_view(sequence) for sequence in state.batch.running],
        num_waiting=num_waiting_sequences(scheduler),
        num_waiting_prompt_tokens=num_waiting_prompt_tokens(scheduler),
        step_id=state.step_id,
        num_preemptions=state.counters.num_preemptions,
        num_cow_copies=state.counters.num_cow_copies,
        num_running=len(state.batch.running),
        usage=kv_usage(scheduler),
    )


def _block_runs(state: SchedulerState) -> list[BlockRun]:
    """Returns runs instead of blocks: with one or two objects for each of 29,000 blocks, this took 45 ms."""
    pool, index = state.cache.pool, state.cache.index
    hits = map(index.hits.get, range(pool.num_blocks), repeat(_NOT_PUBLISHED))
    runs = []
    for (ref_count, num_hits), alike in groupby(zip(pool.ref_counts, hits, strict=True)):
        unreferenced = BlockState.FREE if num_hits == _NOT_PUBLISHED else BlockState.CACHED
        block_state = BlockState.ACTIVE if ref_count else unreferenced
        runs.append(BlockRun(block_state, ref_count, max(num_hits, 0), sum(1 for _ in alike)))
    return runs


def sequence_view(sequence: Sequence) -> SequenceView:
    """Returns a view of a running sequence."""
    return SequenceView(
        request_id=sequence.request.request_id,
        index=sequence.index,
        slot=sequence.slot,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_table=tuple(sequence.block_table),
    )


def unfinished_sequences(state: SchedulerState) -> Iterator[Sequence]:
    """Yields all sequences that have not ended; a group that has beams is represented by its beams."""
    for active in state.requests.values():
        for sequence in active.sequences:
            if not sequence.is_finished:
                yield from active.holders(sequence)


def deferred_releases(state: SchedulerState) -> Iterator[list[int]]:
    """Returns the block tables of sequences that ended while plans in flight could still touch them."""
    return (block_table for step in state.in_flight for block_table in step.releases)


def num_held_slots(state: SchedulerState) -> int:
    """Returns the number of slots held for samples or beams that do not exist yet."""
    return sum(len(active.child_slots) for active in state.requests.values())


def oldest_waiting_s(scheduler: Scheduler, now_s: float) -> float:
    """Returns the seconds that the oldest sequence has waited at `now_s`, in the queue or for the end of its pause.

    0 if none waits.
    """
    queue = scheduler.state.waiting
    return now_s - min((sequence.queued_s for sequence in chain(queue, queue.paused)), default=now_s)


def kv_usage(scheduler: Scheduler) -> KVUsage:
    """Returns the use of the pool.

    Takes time proportional to the blocks of running sequences, and to the size of the pool only if allocation is
    contiguous.
    """
    state = scheduler.state
    pool, index, size = state.cache.pool, state.cache.index, state.cache.block_size
    fill: dict[int, int] = {}  # token slots of a block that hold a token
    reach: dict[int, int] = {}  # for a block that is not full: token slots that will hold a token in the end
    for sequence in state.batch.running:
        num_planned, num_final = sequence.num_planned_tokens, sequence.params.max_total_tokens - 1
        for i, block in enumerate(sequence.block_table):
            start = i * size
            fill[block] = max(fill.get(block, 0), min(size, num_planned - start))
            if num_planned - start < size:
                reach[block] = max(reach.get(block, 0), min(size, num_final - start))
    active = set(fill).union(*deferred_releases(state))
    num_cached = len(index) - sum(block in index for block in active)
    num_used = sum(fill.values())
    num_reached = sum(max(num_filled, reach.get(block, 0)) for block, num_filled in fill.items())
    return KVUsage(
        num_free_blocks=pool.num_free_blocks - num_cached,
        num_cached_blocks=num_cached,
        num_active_blocks=len(active),
        num_shared_blocks=sum(pool.ref_counts[block] > 1 for block in active),
        num_used_token_slots=num_used,
        num_wasted_token_slots=len(fill) * size - num_used,
        num_reserved_token_slots=num_reached - num_used,
        num_internal_token_slots=len(fill) * size - num_reached,
        num_external_token_slots=_num_external_blocks(state) * size,
    )


def _num_external_blocks(state: SchedulerState) -> int:
    """Returns the number of free blocks in runs that are too short for the head of the queue."""
    head, cache = state.waiting.first(), state.cache
    if head is None or not isinstance(cache, ContiguousKVCache):
        return 0
    num_wanted = cache.run_length(head.request)
    return sum(length for length in cache.pool.free_runs() if length < num_wanted)
