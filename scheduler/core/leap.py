"""Many decode steps at once, for a simulator: the same state, without a plan and a result for each.

Most steps of a long trace are alike: every running sequence decodes one token, nobody comes, nobody goes. Such steps
differ from each other in a few sequences only, those that take a block and those whose last block is full:

    step              1  2  3  4  5  6  7  8 …
    sequence a        ·  ·  p  t  ·  ·  p  t        p: publishes a full block, when the result is in
    sequence b        ·  p  t  ·  ·  p  t  ·        t: takes a block, when the step is planned

So a leap costs time in the sequences and in the blocks that they fill, not in the tokens. Publishing is the dearer part
of it: where no prompts are shared, switch prefix caching off.
"""

from collections.abc import Sequence as SequenceOf
from operator import itemgetter

from scheduler.core.books import Books
from scheduler.core.draft import Draft, Step
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence

# (step, 0 for its plan or 1 for its commit, place within it, who takes or publishes a block, or what is released)
_BlockEvent = tuple[int, int, tuple[int, ...], Sequence | list[list[int]]]
_LAST = (1 << 62,)


def leap(scheduler: Scheduler, max_steps: int, token_id: int = 0) -> int:
    """Does up to `max_steps` steps; returns how many. 0: the next step has to be done by `schedule` and `commit`.

    Afterwards everything is as after so many pairs of the two, where each result had `token_id` for everybody and ended
    nobody. A pair makes one plan and commits the oldest: so there are as many in flight as before, none or more, if all
    of them are such steps. No plan is made and no event told: each running sequence has got so many tokens more. It
    stops before a step that ends, admits, preempts or copies; deadlines are the caller's to keep.
    """
    books = scheduler.books
    decoding = books.batch.decoding
    if not _is_plain(scheduler, decoding):
        return 0
    most_steps = min(max_steps, _num_steps_that_write(books, decoding))
    if most_steps <= 0 or _lets_somebody_in(scheduler):
        return 0
    num_steps = _write_tokens(books, decoding, most_steps, token_id)
    if num_steps == 0:
        return 0
    for sequence in decoding:
        sequence.num_planned_tokens += num_steps
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
    for sequence in books.batch.joined:
        sequence.row_count = 1
    books.batch.joined.clear()
    books.batch.retired_slots = []
    _renew_flights(books, decoding, num_steps)
    books.counters.num_steps += num_steps
    books.counters.num_generated_tokens += num_steps * len(decoding)
    return num_steps


def _is_plain(scheduler: Scheduler, decoding: list[Sequence]) -> bool:
    """Whether the next step is one token for everybody who runs, and nothing else, as all those in flight are."""
    books = scheduler.books
    batch = books.batch
    if not scheduler.is_attached or batch.num_reporting or len(books.in_flight) >= books.limits.max_in_flight:
        return False
    if not decoding or len(decoding) != len(batch.running):
        return False  # prompts are being computed, or beams decided
    return all(_is_plain_step(step, decoding) for step in books.in_flight)


def _is_plain_step(step: Step, decoding: list[Sequence]) -> bool:
    has_more = step.prefills or step.admitted or step.ending or step.beams or step.prompt_reports
    return not has_more and step.sampled == decoding


def _num_steps_that_write(books: Books, decoding: SequenceOf[Sequence]) -> int:
    """Until the step in which somebody ends; 0: the next step copies a block."""
    num_steps, size = 1 << 62, books.cache.block_size
    for sequence in decoding:
        num_planned = sequence.num_planned_tokens
        if num_planned >= sequence.write_limit and num_planned % size:
            return 0
        if sequence.num_losses and sequence.is_suspect:
            return 0  # its next token shows that it is harmless, and lets others in
        num_steps = min(num_steps, sequence.params.max_total_tokens - 2 - num_planned)
    return num_steps


def _lets_somebody_in(scheduler: Scheduler) -> bool:
    """Room only shrinks: who cannot come in now cannot later, unless blocks are released when a step in flight is in,
    or one of its prompt is published meanwhile."""
    books = scheduler.books
    first = books.cohort.next_up()
    if first is None:
        return False
    if any(step.releases for step in books.in_flight):
        return True
    budget = books.limits.max_num_batched_tokens - len(books.batch.decoding)
    if scheduler.planner.next_to_admit(Draft(budget)) is not None:
        return True
    return books.cache.reads_prefixes(first) and any(_begins_like(first, other) for other in books.batch.decoding)


def _begins_like(sequence: Sequence, other: Sequence) -> bool:
    """Whether all that the other one knows is what this one begins with."""
    num_tokens = other.num_tokens
    return (
        num_tokens < sequence.num_tokens
        and other.token_ids[-1] == sequence.token_ids[num_tokens - 1]
        and other.token_ids == sequence.token_ids[:num_tokens]
    )


def _write_tokens(books: Books, decoding: SequenceOf[Sequence], num_steps: int, token_id: int) -> int:
    """Appends the tokens; takes, publishes and releases blocks as that many steps do, in their order. Returns before
    which step the pool is short."""
    events = _block_events(books, decoding, num_steps)
    lengths = {sequence: len(sequence.token_ids) for sequence in decoding}
    tokens = [token_id] * num_steps
    for sequence in decoding:
        sequence.token_ids += tokens
    num_done = _change_blocks(books, events, num_steps, lengths)
    if num_done < num_steps:
        for sequence, length in lengths.items():
            del sequence.token_ids[length + num_done :]
    return num_done


def _block_events(books: Books, decoding: SequenceOf[Sequence], num_steps: int) -> list[_BlockEvent]:
    """When a sequence takes a block: step i plans the token after num_planned_tokens + i. When one is full: step i
    commits the KV of the last token that is known before it. When some are released: as the plans in flight say."""
    size, order = books.cache.block_size, books.policy.order
    events: list[_BlockEvent] = [
        (i, 1, _LAST, step.releases) for i, step in enumerate(books.in_flight) if step.releases and i < num_steps
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


def _change_blocks(books: Books, events: list[_BlockEvent], num_steps: int, lengths: dict[Sequence, int]) -> int:
    cache, checked = books.cache, -1
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
    """Blocks that the plan whose first event this is takes from what nobody was promised."""
    num_needed, step = 0, events[first][0]
    for i in range(first, len(events)):
        event_step, is_commit, _, subject = events[i]
        if is_commit or event_step != step:
            break
        num_needed += isinstance(subject, Sequence) and not subject.num_reserved_blocks
    return num_needed


def _renew_flights(books: Books, decoding: list[Sequence], num_steps: int) -> None:
    """Those in flight are the last ones that the leap stands for, and those before it that are still not in."""
    flights = books.in_flight
    num_new = min(num_steps, len(flights))
    for _ in range(num_new):
        flights.popleft()
    books.step_id += num_steps
    for step_id in range(books.step_id - num_new + 1, books.step_id + 1):
        flights.append(Step(step_id, decoding.copy(), [], [], ending=[], beams=[], reporting=[], prompt_reports=[]))
