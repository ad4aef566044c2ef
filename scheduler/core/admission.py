"""Decides whether the next waiting sequence may enter the batch, given slots, blocks, token budget and neighbours.

The admission queue says which sequence is next. No sequence overtakes it: if it cannot enter, none does. Only while
another sequence computes the next block of its prompt, which it will share, it is set aside.
"""

from scheduler.core.sequence import FinishReason, Sequence, State
from scheduler.core.state import SchedulerState
from scheduler.core.step import StepBuilder


def next_to_admit(state: SchedulerState, builder: StepBuilder) -> tuple[Sequence, list[int]] | None:
    """Returns the next sequence, with the blocks that its prompt shares, if slots, blocks and budget suffice.

    Sets those aside that wait for a block which is being computed. Ends requests that start too late for their
    deadline; the next `expire` returns their sequences.
    """
    while not builder.budget.is_exhausted and (sequence := state.admission_queue.first()) is not None:
        if _starts_too_late(state, sequence):
            state.missed += state.end_request(sequence.request.request_id, FinishReason.TOO_LATE)
            continue
        num_unborn = state.active(sequence).num_unborn
        if state.batch.num_free_slots <= num_unborn or not _may_run_beside_others(state, sequence):
            return None
        if not _awaits_the_same(state, builder, sequence):
            prefix = state.cache.find_prefix(sequence)
            if not _awaits_prefix(state, builder, sequence, prefix):
                return (sequence, prefix) if has_room(state, sequence, prefix) else None
            builder.awaited.append((len(prefix), sequence.digests[len(prefix)]))
        state.waiting.set_aside(sequence)
    return None


def _starts_too_late(state: SchedulerState, sequence: Sequence) -> bool:
    """Returns whether the request of a sequence cannot end by its deadline, and has no result yet.

    It goes on while another of its sequences runs: the plan that is being made may have that one's row.
    """
    active = state.active(sequence)
    goes_on = active.has_started or any(other.state is State.RUNNING for other in active.sequences)
    return not goes_on and state.run_time.starts_too_late(sequence, state.now_s)


def admit(state: SchedulerState, sequence: Sequence, prefix: list[int]) -> None:
    """Moves a sequence into the batch. If it was preempted too often, reserves all blocks that it can ever need."""
    state.admit(sequence, prefix)
    state.accounts.charge_admission(sequence)
    if _needs_guarantee(state, sequence):
        sequence.is_guaranteed = True
        num_missing = _num_worst_case_blocks(state, sequence) - len(sequence.block_table)
        state.cache.reserve(sequence, max(0, num_missing))


def _may_run_beside_others(state: SchedulerState, sequence: Sequence) -> bool:
    """Returns False if a suspect would run beside another sequence. A suspect runs alone until it makes progress."""
    running = state.batch.running
    if sequence.is_suspect:
        return not running
    return not any(other.is_suspect for other in running)


def _awaits_the_same(state: SchedulerState, builder: StepBuilder, sequence: Sequence) -> bool:
    """Returns whether the sequence lacks a block for which another was set aside. Saves the search for its prefix."""
    digests = state.cache.shareable_digests(sequence) if builder.awaited else []
    return any(index < len(digests) and digests[index] == digest for index, digest in builder.awaited)


def _awaits_prefix(state: SchedulerState, builder: StepBuilder, sequence: Sequence, prefix: list[int]) -> bool:
    """Returns whether the next block of the prompt is being computed, by this plan or one in flight.

    If so, the block can be shared once the result arrives. Later plans do not count.
    """
    cache, num_found, digests = state.cache, len(prefix), state.cache.shareable_digests(sequence)
    if num_found >= len(digests):
        return False
    end, digest = (num_found + 1) * cache.block_size, digests[num_found]
    return any(
        other.num_computed_tokens < end <= other.num_planned_tokens and cache.is_computing(other, num_found, digest)
        for step in (builder.step, *state.in_flight)
        for other in step.prefills
        if not other.is_finished
    )


def has_room(state: SchedulerState, sequence: Sequence, prefix: list[int], num_growing: int = 0) -> bool:
    """Returns whether there are blocks for all tokens the sequence has now, in addition to what running prompts need.

    A sequence that was preempted too often needs blocks for all tokens it can ever have. `num_growing` decodes have
    still to take a block.
    """
    num_promised = _num_worst_case_blocks(state, sequence) if _needs_guarantee(state, sequence) else 0
    num_needed = state.cache.num_blocks_to_admit(sequence, prefix, num_promised)
    num_needed += num_growing + sum(state.cache.num_blocks_to_prefill(other) for other in state.batch.prefilling)
    if state.batch.running:
        num_needed += state.cache.num_watermark_blocks
    return state.cache.can_admit(sequence, num_needed)


def _needs_guarantee(state: SchedulerState, sequence: Sequence) -> bool:
    """Returns whether the sequence has reached max_preemptions and now needs all its blocks reserved."""
    return sequence.num_preemptions >= state.limits.max_preemptions


def _num_worst_case_blocks(state: SchedulerState, sequence: Sequence) -> int:
    """Returns the most blocks that this sequence, or its beams, can hold.

    Samples share the last block of the prompt and copy it when they write, which takes one more block.
    """
    active, cache = state.active(sequence), state.cache
    if active.group:
        return active.group.num_worst_case_blocks(cache)
    num_blocks = cache.num_blocks_for(sequence.params.max_total_tokens - 1) + (active.num_unborn > 0)
    return min(num_blocks, cache.pool.num_usable_blocks)
