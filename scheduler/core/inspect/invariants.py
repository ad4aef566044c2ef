"""Checks the numbered invariants of the core (docs/invariants.md).

Tests run the check after every step; a live scheduler runs it when it is idle.
"""

from collections import Counter
from collections.abc import Iterator

from scheduler.core.baselines.batching import ClosedBatch, batch_members
from scheduler.core.baselines.contiguous import run_length
from scheduler.core.errors import InvariantViolation
from scheduler.core.inspect.views import deferred_releases, num_held_slots, unfinished_sequences
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence, State
from scheduler.core.state import SchedulerState


def check_invariants(scheduler: Scheduler) -> None:
    """Raises InvariantViolation that lists every broken invariant. Takes time proportional to blocks and tokens."""
    problems = list(_problems(scheduler.state))
    if problems:
        raise InvariantViolation("; ".join(problems))


def _problems(state: SchedulerState) -> Iterator[str]:
    yield from _check_pool(state)
    yield from _check_references(state)
    yield from _check_index(state)
    yield from _check_published_blocks(state)
    yield from _check_states(state)
    yield from _check_closed_batch(state)
    yield from _check_slots(state)
    yield from _check_groups(state)
    yield from _check_reservations(state)
    for sequence in state.batch.running:
        yield from _check_sequence(state, sequence)


def _check_pool(state: SchedulerState) -> Iterator[str]:
    """Checks I1: every block is free or referenced, never both."""
    pool = state.cache.pool
    free = set(pool.free_blocks())
    referenced = {block for block in range(1, pool.num_blocks) if pool.ref_counts[block] > 0}
    if free & referenced:
        yield f"I1: blocks {sorted(free & referenced)} are free and referenced"
    if len(free) + len(referenced) != pool.num_usable_blocks:
        yield f"I1: {len(free)} free + {len(referenced)} referenced blocks are not {pool.num_usable_blocks}"
    if 0 in free or pool.ref_counts[0]:
        yield "I1: the null block was given out"


def _check_references(state: SchedulerState) -> Iterator[str]:
    """Checks I2: a block's ref count is the number of block tables that name it."""
    entries: Counter[int] = Counter()
    for sequence in state.batch.running:
        entries.update(sequence.block_table)
    for block_table in deferred_releases(state):
        entries.update(block_table)
    for block, num_refs in enumerate(state.cache.pool.ref_counts):
        if num_refs != entries[block]:
            yield f"I2: block {block} has ref_count {num_refs} and is in {entries[block]} block tables"


def _check_index(state: SchedulerState) -> Iterator[str]:
    """Checks I4: digests and published blocks are one to one."""
    index = state.cache.index
    blocks = [block for _, block in index.items()]
    if len(set(blocks)) != len(blocks) or any(block not in index for block in blocks):
        yield "I4: the prefix index and its blocks are not one to one"


def _check_states(state: SchedulerState) -> Iterator[str]:
    """Checks I7: an unfinished sequence is waiting or running, never both, never neither; its state says which."""
    waiting, running = {*state.waiting, *state.waiting.paused}, set(state.batch.running)
    unfinished = set(unfinished_sequences(state))
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


def _check_closed_batch(state: SchedulerState) -> Iterator[str]:
    """Checks I20: only members of a closed batch run."""
    members = set(batch_members(state))
    for sequence in state.batch.running if isinstance(state.admission_queue, ClosedBatch) else ():
        if sequence.request.request_id not in members:
            yield f"I20: {sequence!r} runs beside the batch {sorted(members)}, and is no member"


def _check_slots(state: SchedulerState) -> Iterator[str]:
    """Checks I9: every slot is free, held, or that of one sequence."""
    slots = [sequence.slot for sequence in state.batch.running if sequence.slot >= 0]
    num_held, num_free = num_held_slots(state), state.batch.num_free_slots
    if len(set(slots)) != len(slots) or len(slots) + num_held + num_free != state.limits.max_num_seqs:
        yield f"I9: slots {sorted(slots)}, {num_held} held and {num_free} free ones"


def _check_groups(state: SchedulerState) -> Iterator[str]:
    """Checks I9 for groups, which hold as many slots as they may have beams, and I19.

    I19: each beam is decided, in one plan in flight, or late and its group pauses; or others of its group are late or
    in flight, and it has reported.
    """
    late = [active.group.leader for active in state.requests.values() if active.group and active.group.late]
    paused = [group.leader for group in state.batch.paused]
    if set(late) != set(paused) or len(late) != len(paused):
        yield f"I19: the groups of {late} have late beams, and those of {paused} pause"
    in_flight = Counter(beam for step in state.in_flight for beam in step.beams)
    for active in state.requests.values():
        group = active.group
        if group is None or not group.beams:
            continue
        num_slots = len(group.beams) + len(active.child_slots)
        if num_slots != group.params.width:
            yield f"I9: the group of {group.leader!r} holds {num_slots} slots for {group.params.width} beams"
        parents = {parent for parent, _ in group.branches}
        for beam in group.beams:
            places = (in_flight[beam], beam in parents, beam in group.reported, beam in group.late)
            if sum(places) != 1:
                yield f"I19: {beam!r} is in flight, decided, has reported, and is late: {places} times"
        if len(group.reported) == len(group.beams):
            yield f"I19: all beams of {group.leader!r} have reported, and it is not decided"


def _check_reservations(state: SchedulerState) -> Iterator[str]:
    """Checks I10: reserved blocks add up, and are free."""
    cache = state.cache
    leaders = {sequence.leader for sequence in state.batch.running}
    promised = sum(leader.num_reserved_blocks for leader in leaders)
    if promised != cache.num_reserved_blocks or promised > cache.pool.num_free_blocks:
        yield f"I10: {promised} blocks promised, {cache.num_reserved_blocks} booked, {cache.pool.num_free_blocks} free"


def _check_sequence(state: SchedulerState, sequence: Sequence) -> Iterator[str]:
    """Checks I3, I8 and I21 of a running sequence."""
    cache, size = state.cache, state.cache.block_size
    num_planned, num_computed = sequence.num_planned_tokens, sequence.num_computed_tokens
    if not num_computed <= num_planned <= sequence.num_tokens + len(state.in_flight):
        yield f"I8: {sequence!r} has {num_computed} computed, {num_planned} planned of {sequence.num_tokens} tokens"
    num_in_run = run_length(cache, sequence.request)
    if len(sequence.block_table) != max(cache.num_blocks_for(num_planned), num_in_run):
        yield f"I8: {sequence!r} has {len(sequence.block_table)} blocks for {num_planned} tokens"
    first = sequence.block_table[0] if num_in_run else 0
    if sequence.block_table[:num_in_run] != list(range(first, first + num_in_run)):
        yield f"I21: {sequence!r} lies in blocks {sequence.block_table}, which are no run"
    for position in range(num_planned, sequence.write_limit):
        block = sequence.block_table[position // size]
        if cache.pool.ref_counts[block] != 1:
            yield f"I3: {sequence!r} may write to block {block}, which {cache.pool.ref_counts[block]} tables name"
        if block in cache.index:
            yield f"I3: {sequence!r} may write to block {block}, which is published"


def _check_published_blocks(state: SchedulerState) -> Iterator[str]:
    """Checks I5: a published block holds the KV of exactly its digest's tokens, and their results are committed.

    Only blocks that sequences hold can be checked. For a forked sequence's blocks, the parent may know more tokens.
    """
    index, size = state.cache.index, state.cache.block_size
    digests = {block: digest for digest, block in index.items()}
    computed: dict[int, bool] = {}
    for sequence in state.batch.running:
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
