"""A scheduler's state as a value, to see that something has changed nothing."""

from dataclasses import dataclass

from scheduler.core import BlockMap, Scheduler, Sequence, block_map


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the scheduler shows of itself: equal snapshots, unchanged scheduler."""

    block_map: BlockMap
    free_blocks: tuple[int, ...]
    waiting: tuple[Sequence, ...]
    num_in_flight: int
    num_free_slots: int
    num_reserved_blocks: int
    progress: tuple[tuple[int, int, int], ...]


def take_snapshot(scheduler: Scheduler) -> Snapshot:
    return Snapshot(
        block_map(scheduler),
        tuple(scheduler.cache.pool.free_blocks()),
        tuple(scheduler.waiting_sequences()),
        scheduler.num_in_flight,
        scheduler.num_free_slots,
        scheduler.cache.num_reserved_blocks,
        tuple((s.num_tokens, s.num_computed_tokens, s.num_planned_tokens) for s in scheduler.unfinished_sequences()),
    )
