"""Many steps at once, for a clock that need not wait for each: simulation.

While everybody decodes and nobody can come or go, a step differs from the last one by a token for each, and by a block
for those at a border. `leap` does to the core what so many pairs of `schedule` and `commit` would have done: the same
tokens, blocks, published prefixes, plans in flight and counters. It makes no plans and tells no events, so it serves
nobody who has an executor.
"""

from collections.abc import Sequence as SequenceOf
from operator import itemgetter

from scheduler.core.draft import Step
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import Sequence

# (pair, 0 for its plan or 1 for its commit, place within it, who takes or publishes a block, or what is released)
_BlockEvent = tuple[int, int, tuple[int, ...], Sequence | list[list[int]]]
_LAST = (1 << 62,)


def leap(scheduler: Scheduler, max_steps: int, token_id: int = 0) -> int:
    """At most so many pairs, each a `schedule` that returns a plan and a `commit` in which all sampled `token_id`.

    Call it where `max_in_flight - 1` plans are out. Returns the number of pairs, 0 where the next one is not that
    simple; it ends before the plan in which a sequence ends, or which would have to wait for blocks.
    """
    decoding = scheduler.books.batch.decoding
    if not _is_plain(scheduler, decoding):
        return 0
    num_steps = min(max_steps, min(s.params.max_total_tokens - s.num_planned_tokens for s in decoding) - 2)
    if num_steps <= 0:
        return 0
    num_steps = _change_blocks(scheduler, decoding, num_steps, token_id)
    for sequence in decoding:
        sequence.num_planned_tokens += num_steps
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
    _renew_flights(scheduler, decoding, num_steps)
    scheduler.counters.num_steps += num_steps
    scheduler.counters.num_generated_tokens += num_steps * len(decoding)
    return num_steps


def _is_plain(scheduler: Scheduler, decoding: list[Sequence]) -> bool:
    """Whether the next plan is one token for each of those who decode, as all plans in flight are."""
    batch, flights, size = scheduler.books.batch, scheduler.books.in_flight, scheduler.cache.block_size
    if not decoding or not scheduler.is_attached or len(flights) != scheduler.limits.max_in_flight - 1:
        return False
    if len(batch.running) != len(decoding) or batch.prefilling or batch.joined or batch.decided:
        return False
    if batch.retired_slots or batch.num_reporting or not all(_is_plain_step(step, decoding) for step in flights):
        return False
    if any(s.num_planned_tokens == s.write_limit and s.num_planned_tokens % size for s in decoding):
        return False  # its last block is shared: the next token copies it
    return not _may_admit(scheduler, len(decoding), is_freeing=any(step.releases for step in flights))


def _is_plain_step(step: Step, decoding: list[Sequence]) -> bool:
    has_more = step.prefills or step.admitted or step.ending or step.beams or step.prompt_reports
    return not has_more and step.sampled == decoding


def _may_admit(scheduler: Scheduler, num_decodes: int, *, is_freeing: bool) -> bool:
    """Whether the head of the queue could enter in one of the next plans. It cannot for want of slots or of budget; for
    want of blocks neither, unless some become free meanwhile, or a prefix of it may be published."""
    head = scheduler.books.waiting.first()
    if head is None or num_decodes >= scheduler.limits.max_num_batched_tokens:
        return False
    num_slots = 1 + scheduler.books.requests[head.request.request_id].num_unborn
    if scheduler.num_free_slots < num_slots:
        return False
    return is_freeing or scheduler.cache.reads_prefixes(head) or scheduler.planner._has_room_to_admit(head, [])


def _change_blocks(scheduler: Scheduler, decoding: list[Sequence], num_steps: int, token_id: int) -> int:
    """Appends the tokens, takes and publishes blocks in the order of plans and commits. Returns the pairs that there
    were blocks for."""
    lengths = [len(sequence.token_ids) for sequence in decoding]
    events = _block_events(scheduler, decoding, num_steps)
    tokens = [token_id] * num_steps
    for sequence in decoding:
        sequence.token_ids += tokens
    num_done = _take_and_publish(scheduler, events, num_steps, dict(zip(decoding, lengths, strict=True)))
    if num_done < num_steps:
        for sequence, length in zip(decoding, lengths, strict=True):
            del sequence.token_ids[length + num_done :]
    return num_done


def _block_events(scheduler: Scheduler, decoding: SequenceOf[Sequence], num_steps: int) -> list[_BlockEvent]:
    """When a sequence takes a block (pair i plans the token after num_planned_tokens + i), and when one is full (pair i
    commits the KV of the last token known so far)."""
    size, order = scheduler.cache.block_size, scheduler.policy.order
    events: list[_BlockEvent] = [
        (pair, 1, _LAST, step.releases)
        for pair, step in enumerate(scheduler.books.in_flight)
        if step.releases and pair < num_steps
    ]
    for sequence in decoding:
        border = sequence.write_limit - sequence.num_planned_tokens
        if border < num_steps:
            key = order(sequence)
            events += [(pair, 0, key, sequence) for pair in range(border, num_steps, size)]
        full = sequence.publish_at - len(sequence.token_ids)
        if full < num_steps:
            events += [(pair, 1, (sequence.slot,), sequence) for pair in range(full, num_steps, size)]
    events.sort(key=itemgetter(0, 1, 2))
    return events


def _take_and_publish(
    scheduler: Scheduler, events: list[_BlockEvent], num_steps: int, lengths: dict[Sequence, int]
) -> int:
    cache = scheduler.cache
    checked = -1
    for place, (pair, is_commit, _, sequence) in enumerate(events):
        if isinstance(sequence, list):
            for block_table in sequence:
                cache.release(block_table)
        elif is_commit:
            sequence.num_computed_tokens = lengths[sequence] + pair
            cache.publish(sequence)
        else:
            if pair != checked and _num_needed(events, place) > cache.num_available_blocks():
                return pair
            checked = pair
            sequence.block_table.append(cache._take(sequence))
            sequence.write_limit += cache.block_size
    return num_steps


def _num_needed(events: list[_BlockEvent], first: int) -> int:
    """Blocks that the plan whose first event this is takes from what nobody was promised."""
    num_needed = 0
    for pair, is_commit, _, sequence in events[first:]:
        if is_commit or pair != events[first][0]:
            break
        num_needed += isinstance(sequence, Sequence) and not sequence.num_reserved_blocks
    return num_needed


def _renew_flights(scheduler: Scheduler, decoding: list[Sequence], num_steps: int) -> None:
    """The plans in flight are the last ones that the leap stands for, and those before it that are still not in."""
    flights = scheduler.books.in_flight
    num_out = len(flights)
    for _ in range(min(num_steps, num_out)):
        flights.popleft()
    scheduler.books.step_id += num_steps
    for step_id in range(scheduler.step_id - (num_out - len(flights)) + 1, scheduler.step_id + 1):
        flights.append(Step(step_id, decoding.copy(), [], [], ending=[], beams=[], reporting=[], prompt_reports=[]))
