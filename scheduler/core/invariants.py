"""The numbered invariants of the core (docs/invariants.md), as one check.

Tests run it after every step; a live scheduler runs it when it is idle.
"""

from collections import Counter
from collections.abc import Iterator

from scheduler.core.errors import InvariantViolation
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence, State


def check_invariants(scheduler: Scheduler) -> None:
    """Raises InvariantViolation that names every invariant which does not hold. Costs time in blocks and tokens."""
    problems = list(_problems(scheduler))
    if problems:
        raise InvariantViolation("; ".join(problems))


def _problems(scheduler: Scheduler) -> Iterator[str]:
    yield from _pool_is_partitioned(scheduler)
    yield from _references_add_up(scheduler)
    yield from _index_is_one_to_one(scheduler)
    yield from _published_blocks_are_computed(scheduler)
    yield from _everybody_is_somewhere(scheduler)
    yield from _closed_batches_are_closed(scheduler)
    yield from _slots_are_partitioned(scheduler)
    yield from _groups_are_consistent(scheduler)
    yield from _reservations_are_covered(scheduler)
    for sequence in scheduler.running_sequences():
        yield from _sequence_is_consistent(scheduler, sequence)


def _pool_is_partitioned(scheduler: Scheduler) -> Iterator[str]:
    pool = scheduler.cache.pool
    free = set(pool.free_blocks())
    referenced = {block for block in range(1, pool.num_blocks) if pool.ref_counts[block] > 0}
    if free & referenced:
        yield f"I1: blocks {sorted(free & referenced)} are free and referenced"
    if len(free) + len(referenced) != pool.num_usable_blocks:
        yield f"I1: {len(free)} free + {len(referenced)} referenced blocks are not {pool.num_usable_blocks}"
    if 0 in free or pool.ref_counts[0]:
        yield "I1: the null block was given out"


def _references_add_up(scheduler: Scheduler) -> Iterator[str]:
    entries: Counter[int] = Counter()
    for sequence in scheduler.running_sequences():
        entries.update(sequence.block_table)
    for block_table in scheduler.deferred_releases():
        entries.update(block_table)
    for block, num_refs in enumerate(scheduler.cache.pool.ref_counts):
        if num_refs != entries[block]:
            yield f"I2: block {block} has ref_count {num_refs} and stands in {entries[block]} block tables"


def _index_is_one_to_one(scheduler: Scheduler) -> Iterator[str]:
    index = scheduler.cache.index
    blocks = [block for _, block in index.items()]
    if len(set(blocks)) != len(blocks) or any(block not in index for block in blocks):
        yield "I4: the prefix index and its blocks are not one to one"


def _everybody_is_somewhere(scheduler: Scheduler) -> Iterator[str]:
    """I7: an unfinished sequence is waiting or running, never both, never neither; its state says which."""
    waiting = set(scheduler.waiting_sequences())
    running = set(scheduler.running_sequences())
    unfinished = set(scheduler.unfinished_sequences())
    if waiting & running or (waiting | running) != unfinished:
        yield "I7: waiting and running sequences are not a partition of the unfinished ones"
    for sequence in running:
        if sequence.state is not State.RUNNING:
            yield f"I7: {sequence!r} is in the batch"
    for sequence in waiting:
        if sequence.state not in (State.WAITING, State.PREEMPTED):
            yield f"I7: {sequence!r} is in the waiting queue"
        if sequence.block_table or sequence.slot >= 0 or sequence.num_planned_tokens:
            yield f"I7: {sequence!r} waits and holds blocks or a slot"


def _closed_batches_are_closed(scheduler: Scheduler) -> Iterator[str]:
    members = set(scheduler.batch_members())
    for sequence in scheduler.running_sequences():
        if scheduler.batching.is_closed and sequence.request.request_id not in members:
            yield f"I20: {sequence!r} runs beside the batch {sorted(members)}, and is no member"


def _slots_are_partitioned(scheduler: Scheduler) -> Iterator[str]:
    slots = [sequence.slot for sequence in scheduler.running_sequences() if sequence.slot >= 0]
    num_held = len(slots) + scheduler.num_held_slots
    if len(set(slots)) != len(slots) or num_held + scheduler.num_free_slots != scheduler.limits.max_num_seqs:
        yield f"I9: slots {sorted(slots)}, {scheduler.num_held_slots} held and {scheduler.num_free_slots} free ones"


def _groups_are_consistent(scheduler: Scheduler) -> Iterator[str]:
    """I9: a group holds as many slots as it may have beams. I19: each beam is decided, or in one plan in flight."""
    in_flight = Counter(scheduler.undecided_beams())
    for active, group in scheduler.running_groups():
        num_slots = len(group.beams) + len(active.child_slots)
        if num_slots != group.params.width:
            yield f"I9: the group of {group.leader!r} holds {num_slots} slots for {group.params.width} beams"
        parents = {parent for parent, _ in group.branches}
        for beam in group.beams:
            if in_flight[beam] + (beam in parents) != 1:
                yield f"I19: {beam!r} is in flight {in_flight[beam]} times, and decided: {beam in parents}"


def _reservations_are_covered(scheduler: Scheduler) -> Iterator[str]:
    cache = scheduler.cache
    leaders = {sequence.leader for sequence in scheduler.running_sequences()}
    promised = sum(leader.num_reserved_blocks for leader in leaders)
    if promised != cache.num_reserved_blocks or promised > cache.pool.num_free_blocks:
        yield f"I10: {promised} blocks promised, {cache.num_reserved_blocks} booked, {cache.pool.num_free_blocks} free"


def _sequence_is_consistent(scheduler: Scheduler, sequence: Sequence) -> Iterator[str]:
    cache, size = scheduler.cache, scheduler.cache.block_size
    num_planned, num_computed = sequence.num_planned_tokens, sequence.num_computed_tokens
    if not num_computed <= num_planned <= sequence.num_tokens + scheduler.num_in_flight:
        yield f"I8: {sequence!r} has {num_computed} computed, {num_planned} planned of {sequence.num_tokens} tokens"
    run_length = cache.run_length(sequence.request)
    if len(sequence.block_table) != max(cache.num_blocks_for(num_planned), run_length):
        yield f"I8: {sequence!r} has {len(sequence.block_table)} blocks for {num_planned} tokens"
    first = sequence.block_table[0] if run_length else 0
    if sequence.block_table[:run_length] != list(range(first, first + run_length)):
        yield f"I21: {sequence!r} lies in blocks {sequence.block_table}, which are no run"
    for position in range(num_planned, sequence.write_limit):
        block = sequence.block_table[position // size]
        if cache.pool.ref_counts[block] != 1:
            yield f"I3: {sequence!r} may write to block {block}, which {cache.pool.ref_counts[block]} tables name"
        if block in cache.index:
            yield f"I3: {sequence!r} may write to block {block}, which is published"


def _published_blocks_are_computed(scheduler: Scheduler) -> Iterator[str]:
    """I5: what the index finds holds the KV of exactly those tokens, and their results are committed.

    Only blocks that sequences hold can be looked at; of a forked sequence's blocks the parent may know more.
    """
    index, size = scheduler.cache.index, scheduler.cache.block_size
    digests = {block: digest for digest, block in index.items()}
    computed: dict[int, bool] = {}
    for sequence in scheduler.running_sequences():
        num_known_blocks = sequence.num_tokens // size
        chain = index.extend_chain([], sequence.token_ids, num_known_blocks, sequence.request.cache_salt)
        for i, block in enumerate(sequence.block_table):
            if block in digests:
                computed[block] = computed.get(block, False) or (i + 1) * size <= sequence.num_computed_tokens
                if i >= num_known_blocks or digests[block] != chain[i]:
                    yield f"I5: block {block} of {sequence!r} is published for other tokens"
    for block, is_computed in computed.items():
        if not is_computed:
            yield f"I5: block {block} is published, its KV is not computed"
