"""A snapshot of a scheduler, to check that a call has changed nothing."""

from dataclasses import dataclass

from scheduler.core import BlockMap, Scheduler, Sequence, block_map
from scheduler.core.inspect.views import unfinished_sequences


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a scheduler as a value. Equal snapshots mean an unchanged scheduler."""

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
        tuple(scheduler.state.cache.pool.free_blocks()),
        tuple(scheduler.state.waiting),
        scheduler.num_in_flight,
        scheduler.state.batch.num_free_slots,
        scheduler.state.cache.num_reserved_blocks,
        tuple(
            (s.num_tokens, s.num_computed_tokens, s.num_planned_tokens) for s in unfinished_sequences(scheduler.state)
        ),
    )
