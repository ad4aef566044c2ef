"""Many decode steps at once, for a simulator: the same state, without a plan and a result for each.

Most steps of a long trace are alike: every running sequence decodes one token, nobody comes, nobody goes. Such steps
differ from each other in a few sequences only, those that take a block and those whose last block is full:

    step              1  2  3  4  5  6  7  8 …
    sequence a        ·  ·  p  t  ·  ·  p  t        p: publishes a full block, when the result is in
    sequence b        ·  p  t  ·  ·  p  t  ·        t: takes a block, when the step is planned

So a leap costs time in the sequences and in the blocks that they fill, not in the tokens. Publishing is the dearer part
of it: where no prompts are shared, switch prefix caching off.
"""

from collections import defaultdict

from scheduler.core.books import Books
from scheduler.core.draft import Draft
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence


def leap(scheduler: Scheduler, max_steps: int, token_id: int = 0) -> int:
    """Does up to `max_steps` steps; returns how many. 0: the next step has to be done by `schedule` and `commit`.

    Afterwards everything is as after so many pairs of the two, one plan in flight at a time, where each result had
    `token_id` for everybody and ended nobody. No plan is made and no event told: each running sequence has got so many
    tokens more. It stops before a step that ends, admits, preempts or copies; deadlines are the caller's to keep.
    """
    books = scheduler.books
    decoding = books.batch.decoding
    if not scheduler.is_attached or books.in_flight or books.batch.num_reporting or not decoding:
        return 0
    if len(decoding) != len(books.batch.running):
        return 0  # prompts are being computed, or beams decided
    most_steps, size = max_steps, books.cache.block_size
    for sequence in decoding:
        num_planned = sequence.num_planned_tokens
        if num_planned >= sequence.write_limit and num_planned % size:
            return 0  # a copy on write
        if sequence.num_losses and sequence.is_suspect:
            return 0  # its next token shows that it is harmless, and lets others in
        most_steps = min(most_steps, sequence.params.max_total_tokens - 2 - num_planned)
    if most_steps <= 0 or _lets_somebody_in(scheduler):
        return 0
    starts = [sequence.num_planned_tokens for sequence in decoding]
    num_steps = _fill_blocks(books, most_steps, token_id)
    if num_steps == 0:
        return 0
    for sequence, start in zip(decoding, starts, strict=True):
        sequence.num_planned_tokens = sequence.num_computed_tokens = num_planned = start + num_steps
        sequence.token_ids += [token_id] * (num_planned + 1 - len(sequence.token_ids))
        sequence.row_count = 1
    books.batch.joined.clear()
    books.batch.retired_slots = []
    books.step_id += num_steps
    books.counters.num_steps += num_steps
    books.counters.num_generated_tokens += num_steps * len(decoding)
    return num_steps


def _lets_somebody_in(scheduler: Scheduler) -> bool:
    """Room only shrinks: who cannot come in now cannot later, unless a block of its prompt is published meanwhile."""
    books = scheduler.books
    budget = books.limits.max_num_batched_tokens - len(books.batch.decoding)
    if scheduler.planner.next_to_admit(Draft(budget)) is not None:
        return True
    first = books.cohort.next_up()
    return (
        first is not None
        and books.cache.reads_prefixes(first)
        and any(_begins_like(first, other) for other in books.batch.decoding)
    )


def _begins_like(sequence: Sequence, other: Sequence) -> bool:
    """Whether all that the other one knows is what this one begins with."""
    num_tokens = other.num_tokens
    return (
        num_tokens < sequence.num_tokens
        and other.token_ids[-1] == sequence.token_ids[num_tokens - 1]
        and other.token_ids == sequence.token_ids[:num_tokens]
    )


def _fill_blocks(books: Books, num_steps: int, token_id: int) -> int:
    """Takes and publishes blocks as that many steps do, in their order. Returns before which step the pool is short."""
    cache, size = books.cache, books.cache.block_size
    takes: dict[int, list[Sequence]] = defaultdict(list)
    publishes: dict[int, list[Sequence]] = defaultdict(list)
    for sequence in books.batch.decoding:
        num_planned = sequence.num_planned_tokens
        if (step := sequence.write_limit - num_planned) < num_steps:
            takes[step].append(sequence)
        if (step := sequence.publish_at - num_planned - 1) < num_steps:
            publishes[step].append(sequence)
    for taking in takes.values():
        taking.sort(key=books.policy.order)
    for step in range(num_steps):
        if taking := takes.pop(step, []):
            if sum(not sequence.num_reserved_blocks for sequence in taking) > cache.num_available_blocks():
                return step
            for sequence in taking:
                cache.append_block(sequence)
            takes[step + size] = taking
        if publishing := publishes.pop(step, []):
            for sequence in publishing:
                num_computed = sequence.num_computed_tokens = sequence.publish_at
                sequence.token_ids += [token_id] * (num_computed + 1 - len(sequence.token_ids))
                cache.publish(sequence)
            publishes[step + size] = publishing
    return num_steps
