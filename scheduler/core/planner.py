"""Decides the next step: one pass after the other over the books, into a draft.

Batching is rebuilt at every step (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI 2022), under a budget of tokens: sequences that lack one token (decodes) first, then admitted ones that
lack more (prefills, in chunks if need be), then the head of the waiting queue. So long prompts never hold up decodes.
Nor do they hold up other prompts: of what decodes leave, a prompt that is computed in part has half, and newcomers the
rest.
Other batching modes take in less (batching.py); what runs is planned in the same way.

Nobody is preempted while plans are in flight: a short pool first waits for their results, which may end somebody.
"""

from scheduler.core.books import Books
from scheduler.core.draft import Draft
from scheduler.core.errors import InvariantViolation
from scheduler.core.kv_cache import Allocation
from scheduler.core.plan import Admission, Fork, StepPlan
from scheduler.core.sequence import Sequence


class Planner:
    def __init__(self, books: Books) -> None:
        self._books = books

    def plan(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or nothing before another result is in."""
        books = self._books
        growing = self._make_room_for_decodes()
        if growing is None:
            return None
        draft = Draft(budget=books.limits.max_num_batched_tokens)
        self._plan_decodes(draft, growing)
        self._plan_beams(draft)
        self._plan_prefills(draft)
        if draft.has_rows:
            return self._seal(draft)
        if books.batch.running and not books.in_flight:
            raise InvariantViolation("sequences are running, and none of them can compute a token")
        return None

    # --- who runs goes on -------------------------------------------------------------------------------------

    def _make_room_for_decodes(self) -> list[Sequence] | None:
        """The decodes that need a block for their next token, once there is one for each, and for all beams; None: not
        yet."""
        books = self._books
        while True:
            growing = [s for s in books.batch.decoding if s.num_planned_tokens >= s.write_limit]
            unreserved = [s for s in growing if not s.num_reserved_blocks]
            num_needed = books.cache.num_blocks_to_append(unreserved)
            for group in books.batch.decided:
                num_needed += 0 if group.leader.is_guaranteed else group.num_blocks_to_branch(books.cache)
            if num_needed <= books.cache.num_available_blocks():
                return growing
            if books.in_flight:
                return None
            books.preempt(self._choose_victim())

    def _choose_victim(self) -> Sequence:
        candidates = [sequence for sequence in self._books.batch.running if not sequence.is_guaranteed]
        if not candidates:
            raise InvariantViolation("the pool is short, and every running sequence has its blocks promised")
        return max(candidates, key=self._books.policy.victim_order)

    def _plan_decodes(self, draft: Draft, growing: list[Sequence]) -> None:
        batch = self._books.batch
        for sequence in sorted(growing, key=self._books.policy.order):
            draft.add_allocation(sequence, self._allocate(sequence, 1))
        for sequence in batch.joined:
            if sequence.slot >= 0:
                draft.set_row_count(sequence, 1)
        batch.joined.clear()
        draft.add_decodes(batch.decoding)

    def _plan_beams(self, draft: Draft) -> None:
        """One step of each group that is decided: a branch and a row for every beam. There is room for all of them."""
        books = self._books
        for group in books.batch.decided:
            active = books.active(group.leader)
            placed = group.branch(books.cache)
            for beam, _, _ in placed:
                if beam.slot < 0:
                    books.batch.enter(beam, active.child_slots.pop(0))
            for beam, parent, token_id in placed:
                draft.add_allocation(beam, self._allocate(beam, 1))
                draft.add_branch(beam, parent, token_id)
        books.batch.decided = []

    def _plan_prefills(self, draft: Draft) -> None:
        """Half of what is left is for the first of those that are computed already, then it is the turn of newcomers: a
        short prompt does not wait for a long one, and a long one takes at most twice the steps that it takes alone.

        What nobody has taken goes to those that are computed already, in order. Where the first cannot go on, nobody
        comes in behind it.
        """
        prefilling = sorted(self._books.batch.prefilling, key=self._books.policy.order)
        for first in prefilling[:1]:
            self._continue_prefill(draft, first, -(-draft.budget // 2))
        if not prefilling or prefilling[0] in draft.prefills:
            self._admit(draft)
        for sequence in prefilling:
            self._continue_prefill(draft, sequence, draft.budget)

    def _continue_prefill(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        """Up to so many tokens more, as far as there is room."""
        cache = self._books.cache
        num_room = len(sequence.block_table) * cache.block_size - sequence.num_planned_tokens
        num_room += cache.num_available_blocks(sequence) * cache.block_size
        num_tokens = min(sequence.num_uncomputed_tokens, num_tokens, num_room)
        if num_tokens > 0:
            draft.add_allocation(sequence, self._allocate(sequence, num_tokens))
            self._plan_chunk(draft, sequence, num_tokens)

    def _plan_chunk(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        """A row of `num_tokens` for a prefilling sequence; if it lacks no more, it samples and goes on to decode, or
        reports its candidates for first beams."""
        draft.add_prefill(sequence, num_tokens)
        if sequence.num_uncomputed_tokens:
            return
        self._books.batch.prefilling.remove(sequence)
        if sequence.is_beam:
            draft.leaders.append(sequence)
            return
        self._start_decoding(draft, sequence)
        active = self._books.active(sequence)
        while active.num_unborn:
            child = self._books.fork(sequence)  # samples from the same logits
            draft.forks.append(Fork(sequence.slot, child.slot, child.params.seed))
            self._start_decoding(draft, child)

    def _start_decoding(self, draft: Draft, sequence: Sequence) -> None:
        self._books.batch.start_decoding(sequence)
        draft.add_completed(sequence)

    def _allocate(self, sequence: Sequence, num_tokens: int) -> Allocation:
        """Blocks for tokens that were found to have room."""
        allocation = self._books.cache.try_allocate(sequence, num_tokens)
        if allocation is None:
            raise InvariantViolation(f"no blocks for {sequence!r}, though there was room")
        return allocation

    # --- who waits comes in -----------------------------------------------------------------------------------

    def _admit(self, draft: Draft) -> None:
        while (entry := self.next_to_admit(draft)) is not None:
            self._enter_batch(draft, *entry)

    def next_to_admit(self, draft: Draft) -> tuple[Sequence, list[int]] | None:
        """Who is next, with the blocks that its prompt shares, if slots, blocks and budget last. Nobody overtakes."""
        books = self._books
        sequence = books.cohort.next_up() if draft.budget > 0 else None
        if sequence is None:
            return None
        num_unborn = books.active(sequence).num_unborn
        if books.batch.num_free_slots <= num_unborn or not self._may_run_beside_others(sequence):
            return None
        prefix = books.cache.find_prefix(sequence)
        if self._awaits_prefix(draft, sequence, prefix):
            return None
        return (sequence, prefix) if self.has_room_to_admit(sequence, prefix) else None

    def _may_run_beside_others(self, sequence: Sequence) -> bool:
        """A sequence under which executors die runs alone until it has shown that it is not the cause."""
        running = self._books.batch.running
        if sequence.is_suspect:
            return not running
        return not any(other.is_suspect for other in running)

    def _awaits_prefix(self, draft: Draft, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether the next block of its prompt is being computed, by this plan or one in flight: then it is found once
        the result is in, and need not be computed again. Nobody waits for a plan that is not out: so never for long."""
        cache, num_found = self._books.cache, len(prefix)
        if not cache.reads_prefixes(sequence) or num_found >= len(sequence.digests):
            return False
        digest = sequence.digests[num_found]
        return any(
            cache.is_computing(other, num_found, digest)
            for prefills in (draft.prefills.items(), *(step.prefills for step in self._books.in_flight))
            for other, _ in prefills
            if not other.is_finished
        )

    def has_room_to_admit(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Room for all tokens it has now, beside those that running ones have and lack blocks for; and, if it was
        preempted too often, for all it can ever have."""
        books = self._books
        num_promised = self._num_worst_case_blocks(sequence) if self._needs_guarantee(sequence) else 0
        num_needed = books.cache.num_blocks_to_admit(sequence, prefix, num_promised)
        num_needed += sum(books.cache.num_blocks_to_prefill(other) for other in books.batch.prefilling)
        if books.batch.running:
            num_needed += books.num_watermark_blocks
        return num_needed <= books.cache.num_available_blocks() and books.cache.has_run_for(sequence)

    def _needs_guarantee(self, sequence: Sequence) -> bool:
        """Preempted as often as a sequence may be: it runs again only with all its blocks promised."""
        return sequence.num_preemptions >= self._books.limits.max_preemptions

    def _num_worst_case_blocks(self, sequence: Sequence) -> int:
        """Blocks this sequence, or its beams, can come to hold; one more if samples will share, and copy, the last."""
        active, cache = self._books.active(sequence), self._books.cache
        if active.group:
            return active.group.num_worst_case_blocks(cache)
        num_blocks = cache.num_blocks_for(sequence.params.max_total_tokens - 1) + (active.num_unborn > 0)
        return min(num_blocks, cache.pool.num_usable_blocks)

    def _enter_batch(self, draft: Draft, sequence: Sequence, prefix: list[int]) -> None:
        self._books.admit(sequence, prefix)
        if self._needs_guarantee(sequence):
            sequence.is_guaranteed = True
            num_missing = self._num_worst_case_blocks(sequence) - len(sequence.block_table)
            self._books.cache.reserve(sequence, max(0, num_missing))
        num_cached = sequence.num_computed_tokens
        num_tokens = min(sequence.num_uncomputed_tokens, draft.budget)
        self._allocate(sequence, num_tokens)
        draft.admissions.append(
            Admission(
                slot=sequence.slot,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=num_cached,
                block_table=list(sequence.block_table),
                params=sequence.params,
            )
        )
        draft.admitted.append((sequence, num_cached))
        self._plan_chunk(draft, sequence, num_tokens)

    # --- out it goes ------------------------------------------------------------------------------------------

    def _seal(self, draft: Draft) -> StepPlan:
        books, batch = self._books, self._books.batch
        for sequence, num_tokens in draft.prefills.items():
            draft.set_row_count(sequence, num_tokens)
        for sequence in batch.prefilling:
            if sequence not in draft.prefills:
                draft.set_row_count(sequence, 0)
        books.step_id += 1
        plan, step = draft.seal(books.epoch, books.step_id, batch.retired_slots, has_reporting=batch.num_reporting > 0)
        batch.retired_slots = []
        for sequence in draft.ending:  # the executor hears of it with the next plan: this one computes their last row
            batch.retire(sequence)
        books.in_flight.append(step)
        books.counters.num_steps += 1
        books.counters.num_cow_copies += len(draft.block_copies) // 2
        return plan
