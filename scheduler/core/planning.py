"""Plans the next step in several passes over the state, which fill a StepBuilder.

The batch is rebuilt at every step (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI 2022), under a budget of tokens and time (timing/). Sequences with one token to compute (decodes) come
first, then admitted sequences with more (prefills, in chunks if necessary), then the head of the waiting queue. Long
prompts therefore never delay decodes. Nor do they block other prompts: the first partly computed prompt gets half of
the budget that decodes leave, and shorter ones and newly admitted sequences get the rest. Only a short prompt of a
tenant that has nothing in the batch may come before the decodes (fairness/newcomers.py).

No sequence is preempted while plans are in flight. If blocks are short, the planner first waits for the results of
these plans, which may end sequences.
"""

from operator import attrgetter

from scheduler.core.admission import admit, has_room, next_to_admit
from scheduler.core.errors import InvariantViolation
from scheduler.core.fairness.newcomers import may_pass
from scheduler.core.kv_cache import Allocation
from scheduler.core.plan import Admission, Fork, StepPlan
from scheduler.core.sequence import Sequence
from scheduler.core.state import SchedulerState
from scheduler.core.step import StepBuilder


def plan_step(state: SchedulerState) -> StepPlan | None:
    """Returns the next plan, or None if there is nothing to compute until a request or a result arrives.

    A plan without rows only tells the executor which blocks were published or withdrawn. It is made if no plan with
    rows follows soon.
    """
    growing = _make_room_for_decodes(state)
    if growing is None:
        return None
    state.waiting.take_back(state.now_s)
    builder = StepBuilder(state.epoch, state.step_id + 1, state.new_budget())
    if len(state.accounts.active) > 1 and _let_newcomer_pass(state, builder, growing):
        return _send(state, builder)
    _plan_decodes(state, builder, growing)
    _plan_beams(state, builder)
    if state.batch.prefilling or state.waiting:
        _plan_prefills(state, builder)
    if builder.plan.num_sequences:
        return _send(state, builder)
    if state.in_flight:
        return None
    if state.batch.running and not state.batch.paused:
        raise InvariantViolation("sequences are running, and none of them can compute a token")
    return _send(state, builder) if state.cache.index.has_news else None


# --- running sequences ----------------------------------------------------------------------------------------


def _make_room_for_decodes(state: SchedulerState) -> list[Sequence] | None:
    """Returns the decodes that need a block, or None if there are not enough blocks for them and for all beams.

    Preempts sequences if that is what it takes, or if their tenant is too far ahead of one that waits.
    """
    while True:
        growing = [s for s in state.batch.decoding if s.num_planned_tokens >= s.write_limit]
        unreserved = [s for s in growing if not s.num_reserved_blocks]
        num_needed = state.cache.num_blocks_to_append(unreserved)
        for group in state.batch.decided:
            num_needed += 0 if group.leader.is_guaranteed else group.num_blocks_to_branch(state.cache)
        is_short = num_needed > state.cache.num_available_blocks()
        victim = state.waiting.choose_victim(is_short=is_short)
        if victim is None:
            return growing
        if state.in_flight:
            return None
        claimant = None if is_short else state.waiting.left_behind
        state.preempt(victim)
        if claimant is not None:
            state.accounts.displace(victim.leader, claimant.account)


def _plan_decodes(state: SchedulerState, builder: StepBuilder, growing: list[Sequence]) -> None:
    batch = state.batch
    for sequence in sorted(growing, key=state.policy.order):
        builder.add_allocation(sequence, _allocate(state, sequence, 1))
    for sequence in batch.joined:
        if sequence.slot >= 0:
            builder.set_row_count(sequence, 1)
    batch.joined.clear()
    builder.add_decodes(batch.decoding)


def _plan_beams(state: SchedulerState, builder: StepBuilder) -> None:
    """Plans one step of each decided group: a branch and a row for each beam. The caller has made room for them.

    And repeats the rows of beams that were late, once their pause has ended.
    """
    for group in state.batch.decided:
        active = state.active(group.leader)
        placed = group.branch(state.cache)
        for beam, _, _ in placed:
            if beam.slot < 0:
                state.batch.enter(beam, active.child_slots.pop(0))
        for beam, parent, token_id in placed:
            builder.add_allocation(beam, _allocate(state, beam, 1))
            builder.add_branch(beam, parent, token_id)
    state.batch.decided = []
    for group in state.batch.take_resumed(state.now_s):
        for beam in group.late:
            builder.set_row_count(beam, 1)
            builder.add_beam(beam)
        group.late = []


def _plan_prefills(state: SchedulerState, builder: StepBuilder) -> None:
    """Gives half of the budget that is left to the first running prompt, and half of the rest to each shorter one.

    A prompt is shorter if it has fewer tokens left to compute. Then admits waiting sequences. Short prompts therefore
    do not wait for a long one, which takes at most twice as many steps as it would alone. The rest of the budget goes
    to running prompts, to those with the least left first. If the first in order has no room, no sequence is admitted.
    """
    prefilling = sorted(state.batch.prefilling, key=state.policy.order)
    for first in prefilling[:1]:
        _continue_prefill(state, builder, first, builder.budget.room_for(first, share=2))
    by_length = sorted(prefilling, key=attrgetter("num_uncomputed_tokens"))
    for sequence in by_length[: by_length.index(prefilling[0]) if prefilling else 0]:
        _continue_prefill(state, builder, sequence, builder.budget.room_for(sequence, share=2))
    if not prefilling or prefilling[0] in builder.step.prefills:
        while (entry := next_to_admit(state, builder)) is not None:
            _start_prefill(state, builder, *entry)
    state.waiting.left_behind = state.admission_queue.first()
    for sequence in by_length:
        _continue_prefill(state, builder, sequence, builder.budget.room_for(sequence))


def _let_newcomer_pass(state: SchedulerState, builder: StepBuilder, growing: list[Sequence]) -> bool:
    """Pauses the batch and plans only the prompt of the next sequence, if it may pass (I26). Returns whether it may."""
    batch, waiting = state.batch, state.waiting
    if batch.decided or waiting.paused_step_id == state.step_id:
        return False
    entry = next_to_admit(state, builder)
    if entry is None or not has_room(state, *entry, num_growing=len(growing)):
        return False
    if not may_pass(*entry, batch, waiting, state.cache, state.limits, state.costs, growing):
        return False
    waiting.paused_step_id = builder.step.step_id
    batch.joined = batch.decoding.copy()  # the next plan resumes them
    for sequence in batch.decoding:
        builder.set_row_count(sequence, 0)
    _start_prefill(state, builder, *entry)
    return True


def _start_prefill(state: SchedulerState, builder: StepBuilder, sequence: Sequence, prefix: list[int]) -> None:
    admit(state, sequence, prefix)
    num_cached = sequence.num_computed_tokens
    num_tokens = min(sequence.num_uncomputed_tokens, builder.budget.room_for(sequence))
    _allocate(state, sequence, num_tokens)
    builder.plan.admissions.append(
        Admission(
            slot=sequence.slot,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=num_cached,
            block_table=list(sequence.block_table),
            params=sequence.params,
        )
    )
    builder.step.admitted.append((sequence, num_cached))
    _plan_chunk(state, builder, sequence, num_tokens)


def _continue_prefill(state: SchedulerState, builder: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
    """Plans up to `num_tokens` more tokens of a prompt, limited by the free blocks."""
    cache = state.cache
    num_room = len(sequence.block_table) * cache.block_size - sequence.num_planned_tokens
    num_room += cache.num_available_blocks(sequence) * cache.block_size
    num_tokens = min(sequence.num_uncomputed_tokens, num_tokens, num_room)
    if num_tokens > 0:
        builder.add_allocation(sequence, _allocate(state, sequence, num_tokens))
        _plan_chunk(state, builder, sequence, num_tokens)


def _plan_chunk(state: SchedulerState, builder: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
    """Plans a row with `num_tokens` tokens of a prompt.

    If the row completes the prompt, the sequence samples and starts to decode, or reports candidates for its first
    beams.
    """
    builder.add_prefill(sequence, num_tokens)
    if sequence.num_uncomputed_tokens:
        return
    state.batch.prefilling.remove(sequence)
    if sequence.is_beam:
        builder.step.beams.append(sequence)
        return
    _start_decoding(state, builder, sequence)
    active = state.active(sequence)
    while active.num_unborn:
        child = state.fork(sequence)  # samples from the same logits
        builder.plan.forks.append(Fork(sequence.slot, child.slot, child.params.seed))
        _start_decoding(state, builder, child)


def _start_decoding(state: SchedulerState, builder: StepBuilder, sequence: Sequence) -> None:
    state.batch.start_decoding(sequence)
    builder.add_sample(sequence)


def _allocate(state: SchedulerState, sequence: Sequence, num_tokens: int) -> Allocation:
    """Allocates blocks for tokens for which the caller has found room."""
    allocation = state.cache.try_allocate(sequence, num_tokens)
    if allocation is None:
        raise InvariantViolation(f"no blocks for {sequence!r}, though there was room")
    return allocation


# --- in flight ------------------------------------------------------------------------------------------------


def _send(state: SchedulerState, builder: StepBuilder) -> StepPlan:
    """Completes the plan and puts its step in flight."""
    batch = state.batch
    for sequence, num_tokens in builder.step.prefills.items():
        builder.set_row_count(sequence, num_tokens)
    for sequence in batch.prefilling:
        if sequence not in builder.step.prefills:
            builder.set_row_count(sequence, 0)
    plan, step = builder.build(batch.retired_slots, has_reporting=batch.num_reporting > 0)
    if state.cache.index.has_news:
        plan.published, plan.withdrawn_blocks = state.cache.index.take_news()
        step.withdraws = bool(plan.withdrawn_blocks)
    batch.retired_slots = []
    for sequence in step.ending:  # this plan computes their last rows, so the next one retires their slots
        batch.retire(sequence)
    state.step_id = step.step_id
    state.in_flight.append(step)
    state.counters.num_steps += 1
    state.counters.num_cow_copies += len(plan.block_copies) // 2
    return plan
