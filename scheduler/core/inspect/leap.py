"""Does many decode steps at once, for simulators: the state is the same, without a plan and a result for each step.

Most steps of a long trace are alike: every running sequence decodes one token, and no request arrives or ends. Such
steps differ only in the few sequences that take a block or fill one:

    step              1  2  3  4  5  6  7  8 …
    sequence a        ·  ·  p  t  ·  ·  p  t        p: publishes a full block, when the result is committed
    sequence b        ·  p  t  ·  ·  p  t  ·        t: takes a block, when the step is planned

A leap therefore takes time proportional to the sequences and the blocks that they fill, not to the tokens. Most of the
time goes into publishing: if no prompts are shared, disable prefix caching.
"""

from collections.abc import Sequence as SequenceOf
from operator import itemgetter

from scheduler.core.admission import next_to_admit
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence
from scheduler.core.state import SchedulerState
from scheduler.core.step import Step, StepBuilder

# (step, 0 for its plan or 1 for its commit, place within it, the sequence that takes or publishes, or block tables to
# release)
_BlockEvent = tuple[int, int, tuple[int, ...], Sequence | list[list[int]]]
_LAST = (1 << 62,)


def leap(scheduler: Scheduler, max_steps: int, token_id: int = 0) -> int:
    """Does up to `max_steps` steps and returns their number. After 0, `schedule` and `commit` have to do the next step.

    The state is then the same as after that number of calls of both, if every result had `token_id` for all sequences
    and ended none. As many plans are in flight as before; all of them must be plain decode steps. A leap makes no plan
    and reports no event: each running sequence has one more token for each step. It stops before a step that ends,
    admits, preempts or copies. The caller has to watch deadlines.
    """
    state = scheduler.state
    decoding = state.batch.decoding
    if not scheduler.is_attached or not _is_plain(state, decoding):
        return 0
    most_steps = min(max_steps, _num_steps_that_write(state, decoding))
    if most_steps <= 0 or _may_admit(state):
        return 0
    num_steps = _write_tokens(state, decoding, most_steps, token_id)
    if num_steps == 0:
        return 0
    for sequence in decoding:
        sequence.num_planned_tokens += num_steps
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
    for sequence in state.batch.joined:
        sequence.row_count = 1
    state.batch.joined.clear()
    state.batch.retired_slots = []
    _replace_steps_in_flight(state, decoding, num_steps)
    state.counters.num_steps += num_steps
    state.counters.num_generated_tokens += num_steps * len(decoding)
    state.accounts.charge_tokens(decoding, num_steps)
    return num_steps


def _is_plain(state: SchedulerState, decoding: list[Sequence]) -> bool:
    """Returns whether the next step, like those in flight, is one token for each running sequence and nothing else."""
    batch = state.batch
    if batch.num_reporting or len(state.in_flight) >= state.limits.max_in_flight:
        return False
    if not decoding or len(decoding) != len(batch.running):
        return False  # prompts are being computed, or beams decided
    if len(state.waiting) and len(state.accounts.active) > 1:
        return False  # which tenant is next, and whether it gets a place by preemption, changes with each step
    return all(_is_plain_step(step, decoding) for step in state.in_flight)


def _is_plain_step(step: Step, decoding: list[Sequence]) -> bool:
    has_more = step.prefills or step.admitted or step.ending or step.beams or step.prompt_reports
    return not has_more and step.sampled == decoding


def _num_steps_that_write(state: SchedulerState, decoding: SequenceOf[Sequence]) -> int:
    """Returns the number of steps before one that ends a sequence; 0 if the next step copies a block."""
    num_steps, size = 1 << 62, state.cache.block_size
    for sequence in decoding:
        num_planned = sequence.num_planned_tokens
        if num_planned >= sequence.write_limit and num_planned % size:
            return 0
        if sequence.num_losses and sequence.is_suspect:
            return 0  # it soon makes progress, and others may be admitted
        num_steps = min(num_steps, sequence.params.max_total_tokens - 2 - num_planned)
    return num_steps


def _may_admit(state: SchedulerState) -> bool:
    """Returns whether a sequence may be admitted during the leap.

    Room only shrinks, so a sequence that cannot enter now cannot enter later, unless a step in flight releases blocks
    or a running sequence publishes a block of its prompt.
    """
    state.waiting.take_back(state.now_s)
    first = state.admission_queue.first()
    if first is None:
        return False
    if any(step.releases for step in state.in_flight):
        return True
    budget = state.new_budget()
    budget.take_decodes(state.batch.decoding)
    if next_to_admit(state, StepBuilder(state.epoch, state.step_id + 1, budget)) is not None:
        return True
    return state.cache.reads_prefixes(first) and any(_begins_like(first, other) for other in state.batch.decoding)


def _begins_like(sequence: Sequence, other: Sequence) -> bool:
    """Returns whether all known tokens of `other` are a proper prefix of `sequence`."""
    num_tokens = other.num_tokens
    return (
        num_tokens < sequence.num_tokens
        and other.token_ids[-1] == sequence.token_ids[num_tokens - 1]
        and other.token_ids == sequence.token_ids[:num_tokens]
    )


def _write_tokens(state: SchedulerState, decoding: SequenceOf[Sequence], num_steps: int, token_id: int) -> int:
    """Appends tokens, and takes, publishes and releases blocks, in the same order as `num_steps` single steps.

    Returns the number of steps done before the pool was short.
    """
    events = _block_events(state, decoding, num_steps)
    lengths = {sequence: len(sequence.token_ids) for sequence in decoding}
    tokens = [token_id] * num_steps
    for sequence in decoding:
        sequence.token_ids += tokens
    num_done = _change_blocks(state, events, num_steps, lengths)
    if num_done < num_steps:
        for sequence, length in lengths.items():
            del sequence.token_ids[length + num_done :]
    return num_done


def _block_events(state: SchedulerState, decoding: SequenceOf[Sequence], num_steps: int) -> list[_BlockEvent]:
    """Returns the block events of the steps, in order.

    A sequence takes a block in the plan of step i, which plans the token after num_planned_tokens + i. A block is full
    in the commit of step i, which commits the KV of the last token known before it. Steps in flight say what they
    release.
    """
    size, order = state.cache.block_size, state.policy.order
    events: list[_BlockEvent] = [
        (i, 1, _LAST, step.releases) for i, step in enumerate(state.in_flight) if step.releases and i < num_steps
    ]
    for sequence in decoding:
        border = sequence.write_limit - sequence.num_planned_tokens
        if border < num_steps:
            key = order(sequence)
            events += [(i, 0, key, sequence) for i in range(border, num_steps, size)]
        full = sequence.publish_at - len(sequence.token_ids)
        if full < num_steps:
            events += [(i, 1, (sequence.slot,), sequence) for i in range(full, num_steps, size)]
    events.sort(key=itemgetter(0, 1, 2))
    return events


def _change_blocks(
    state: SchedulerState, events: list[_BlockEvent], num_steps: int, lengths: dict[Sequence, int]
) -> int:
    cache, checked = state.cache, -1
    for place, (step, is_commit, _, subject) in enumerate(events):
        if isinstance(subject, list):
            for block_table in subject:
                cache.release(block_table)
        elif is_commit:
            subject.num_computed_tokens = lengths[subject] + step
            cache.publish(subject)
        else:
            if step != checked and _num_needed(events, place) > cache.num_available_blocks():
                return step
            checked = step
            cache.append_block(subject)
    return num_steps


def _num_needed(events: list[_BlockEvent], first: int) -> int:
    """Returns the number of unreserved blocks that one plan takes; `first` is the plan's first event."""
    num_needed, step = 0, events[first][0]
    for i in range(first, len(events)):
        event_step, is_commit, _, subject = events[i]
        if is_commit or event_step != step:
            break
        num_needed += isinstance(subject, Sequence) and not subject.num_reserved_blocks
    return num_needed


def _replace_steps_in_flight(state: SchedulerState, decoding: list[Sequence], num_steps: int) -> None:
    """Replaces the oldest steps in flight by the last steps of the leap, so that as many are in flight as before."""
    num_new = min(num_steps, len(state.in_flight))
    for _ in range(num_new):
        state.in_flight.popleft()
    state.step_id += num_steps
    for step_id in range(state.step_id - num_new + 1, state.step_id + 1):
        state.in_flight.append(Step(step_id, decoding.copy()))
