"""The scheduler core: a pure state machine. It decides; the executor computes.

One step is a sentence:

    plan = scheduler.schedule()      what to compute, as a difference to the step before; None: nothing, for now
    events = scheduler.commit(result)

Batching is rebuilt at every step (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
Models", OSDI 2022), under a budget of tokens: sequences that lack one token (decodes) first, then admitted ones that
lack more (prefills, in chunks if need be), then the head of the waiting queue. So long prompts never hold up decodes.

Up to `max_in_flight` plans are out. A decode row means "the token this slot sampled last", so the next plan leaves
before that token is known. Two rules keep this simple:

* What ends or is cancelled while plans are in flight keeps its blocks until the newest of them is committed.
* Nobody is preempted while plans are in flight: a short pool first waits for their results, which may end somebody.

Beams are the exception to planning ahead: which of them go on is decided here, so each step of a group (beam_group.py)
waits for the results of its last. To the rest of the batch it is one more decode, or several.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from scheduler.core.active_request import ActiveRequest
from scheduler.core.batch import Batch
from scheduler.core.beam import Candidates
from scheduler.core.beam_group import BeamGroup
from scheduler.core.capacity import check_fits, check_queue_takes, fits, max_tokens_per_sequence
from scheduler.core.draft import Draft, Step
from scheduler.core.errors import InvariantViolation, ResultMismatch
from scheduler.core.kv_cache import Allocation, KVCache
from scheduler.core.limits import Limits
from scheduler.core.plan import Admission, Events, Fork, StepPlan, StepResult
from scheduler.core.policy import FCFS, Policy
from scheduler.core.reports import add_logprobs, add_prompt_logprobs, candidates_by_beam, check_reports
from scheduler.core.request import Request
from scheduler.core.sequence import FinishReason, Sequence, State
from scheduler.core.stats import Counters
from scheduler.core.waiting_queue import WaitingQueue


class Scheduler:
    """See the module. Not thread-safe; no clock, no I/O; every method returns at once."""

    def __init__(
        self,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        policy: Policy = FCFS,
        model_name: str = "",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.counters = Counters()
        self._block_size = block_size
        self._model_name = model_name
        self._enable_prefix_caching = enable_prefix_caching
        self._requests: dict[int, ActiveRequest] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._num_arrivals = 0
        self._waiting = WaitingQueue(policy)
        self._start_epoch(0, num_blocks)
        self.is_attached = False

    # --- requests come and go ---------------------------------------------------------------------------------

    @property
    def max_tokens_per_sequence(self) -> int:
        """Most tokens (prompt and output) that one sequence can reach. The KV of the last one is never needed."""
        return max_tokens_per_sequence(self.limits, self.cache)

    def add(self, request: Request) -> None:
        """Takes a request into the waiting queue, and with that the duty to finish it.

        Raises CapacityExceeded if it can never fit, QueueFull if the queue is at its bound. Request ids are unique;
        prompts are not empty.
        """
        check_fits(request, self.limits, self.cache)
        check_queue_takes(request, self.limits, self._waiting)
        self._num_arrivals += 1
        sequence = Sequence(request, index=0, arrival=self._num_arrivals)
        group = BeamGroup(sequence, request.beam) if request.beam else None
        self._requests[request.request_id] = ActiveRequest(request, [sequence], group=group)
        self._waiting.add(sequence)
        if request.deadline_s is not None:
            heappush(self._deadlines, (request.deadline_s, request.request_id))

    def cancel(self, request_id: int) -> None:
        """Ends a request in whatever state it is. One that has ended already is no error: the two may cross."""
        self._end_request(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: int, index: int) -> Events:
        """Ends one sequence because its text is complete (a stop string). Too late is no error.

        A sequence without a token has no text: it goes on, and so does a fork that is still in flight.
        """
        events = Events()
        active = self._requests.get(request_id)
        for sequence in active.sequences if active else ():
            has_text = sequence.num_tokens > sequence.num_prompt_tokens
            if sequence.index == index and has_text and not sequence.is_finished:
                self._finish(sequence, FinishReason.STOP)
                events.finished.append((sequence, FinishReason.STOP))
        return events

    def expire(self, now_s: float) -> Events:
        """Ends every request whose deadline is not after `now_s`, waiting or running."""
        events = Events()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heappop(self._deadlines)
            events.finished += self._end_request(request_id, FinishReason.DEADLINE)
        return events

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that no running sequence holds; returns the number of blocks."""
        return self.cache.forget_prefixes()

    # --- executors come and go --------------------------------------------------------------------------------

    def executor_attached(self, epoch: int, num_blocks: int) -> Events:
        """An executor with an empty pool of `num_blocks` takes part from now on, in a new epoch.

        Returns the requests that have to fail: this pool is smaller than the last, and they can never fit it.
        """
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} is not after {self.epoch}")
        if self.is_attached:
            raise InvariantViolation("an executor is attached already")
        self._start_epoch(epoch, num_blocks)
        self.is_attached = True
        events = Events()
        for sequence in list(self._waiting):
            if not sequence.is_finished and not fits(sequence.request, self.limits, self.cache):
                events.finished += self._end_request(sequence.request.request_id, FinishReason.ERROR)
        return events

    def executor_lost(self) -> Events:
        """The executor, or the way to it, is gone, and every KV block with it. What ran waits again, tokens kept.

        Returns the sequences given up because executor after executor was lost under them.
        """
        events = Events()
        if not self.is_attached:
            return events
        self.is_attached = False
        self._in_flight.clear()
        for sequence in dict.fromkeys(running.purse for running in self._batch.running):
            self._give_all_back(sequence)
            sequence.count_loss()
            sequence.become(State.WAITING)
            self._waiting.add(sequence)
            if sequence.num_losses > self.limits.max_losses:
                self._finish(sequence, FinishReason.ERROR)
                events.finished.append((sequence, FinishReason.ERROR))
        self._start_epoch(self.epoch, self.cache.pool.num_blocks)
        return events

    def _start_epoch(self, epoch: int, num_blocks: int) -> None:
        self.epoch = epoch
        self.step_id = 0
        self.cache = KVCache(
            num_blocks, self._block_size, self._model_name, enable_prefix_caching=self._enable_prefix_caching
        )
        self._num_watermark_blocks = int(self.limits.watermark_ratio * num_blocks)
        self._in_flight: deque[Step] = deque()
        self._batch = Batch(self.limits.max_num_seqs)

    # --- a step: schedule -------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or nothing before another result is in."""
        if not self.is_attached or len(self._in_flight) >= self.limits.max_in_flight:
            return None
        growing = self._make_room_for_decodes()
        if growing is None:
            return None
        draft = Draft(budget=self.limits.max_num_batched_tokens)
        self._plan_decodes(draft, growing)
        self._plan_beams(draft)
        self._plan_prefills(draft)
        self._admit(draft)
        if draft.has_rows:
            return self._seal(draft)
        if self._batch.running and not self._in_flight:
            raise InvariantViolation("sequences are running, and none of them can compute a token")
        return None

    def _make_room_for_decodes(self) -> list[Sequence] | None:
        """The decodes that need a block for their next token, once there is one for each, and for all beams; None: not
        yet."""
        while True:
            growing = [s for s in self._batch.decoding if s.num_planned_tokens >= s.write_limit]
            unreserved = [s for s in growing if not s.num_reserved_blocks]
            num_needed = self.cache.num_blocks_to_append(unreserved)
            for group in self._batch.decided:
                num_needed += 0 if group.leader.is_guaranteed else group.num_blocks_to_branch(self.cache)
            if num_needed <= self.cache.num_available_blocks():
                return growing
            if self._in_flight:
                return None
            self._preempt(self._choose_victim())

    def _plan_decodes(self, draft: Draft, growing: list[Sequence]) -> None:
        for sequence in sorted(growing, key=self.policy.order):
            draft.add_allocation(sequence, self._allocate(sequence, 1))
        for sequence in self._batch.joined:
            if sequence.slot >= 0:
                draft.set_row_count(sequence, 1)
        self._batch.joined.clear()
        draft.add_decodes(self._batch.decoding)

    def _plan_beams(self, draft: Draft) -> None:
        """One step of each group that is decided: a branch and a row for every beam. There is room for all of them."""
        for group in self._batch.decided:
            active = self._requests[group.leader.request.request_id]
            placed = group.branch(self.cache)
            for beam, _, _ in placed:
                if beam.slot < 0:
                    self._batch.enter(beam, active.child_slots.pop(0))
                    self.counters.num_branches += 1
            for beam, parent, token_id in placed:
                draft.add_allocation(beam, self._allocate(beam, 1))
                draft.add_branch(beam, parent, token_id)
        self._batch.decided = []

    def _plan_prefills(self, draft: Draft) -> None:
        for sequence in list(self._batch.prefilling):
            num_room = len(sequence.block_table) * self._block_size - sequence.num_planned_tokens
            num_room += self.cache.num_available_blocks(sequence) * self._block_size
            num_tokens = min(sequence.num_uncomputed_tokens, draft.budget, num_room)
            if num_tokens > 0:
                draft.add_allocation(sequence, self._allocate(sequence, num_tokens))
                self._plan_chunk(draft, sequence, num_tokens)

    def _admit(self, draft: Draft) -> None:
        """Admits from the head of the queue while slots, blocks and budget last. Nobody overtakes the head.

        A prompt that is still being computed comes before new ones, so at most one is computed in part.
        """
        while not self._batch.prefilling and draft.budget > 0 and (sequence := self._waiting.first()) is not None:
            active = self._requests[sequence.request.request_id]
            if self._batch.num_free_slots <= active.num_unborn or not self._may_run_beside_others(sequence):
                return
            prefix = self.cache.find_prefix(sequence)
            if self._awaits_prefix(draft, sequence, prefix):
                self.counters.num_prefix_waits += 1
                return
            if not self._has_room_to_admit(sequence, prefix):
                return
            self._waiting.remove(sequence)
            self._enter_batch(draft, sequence, active, prefix)

    def _may_run_beside_others(self, sequence: Sequence) -> bool:
        """A sequence under which executors die runs alone until it has shown that it is not the cause."""
        if sequence.is_suspect:
            return not self._batch.running
        return not any(running.is_suspect for running in self._batch.running)

    def _awaits_prefix(self, draft: Draft, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether the next block of its prompt is being computed, by this plan or one in flight: then it is found once
        the result is in, and need not be computed again. Nobody waits for a plan that is not out: so never for long."""
        num_found = len(prefix)
        if not self.cache.reads_prefixes(sequence) or num_found >= len(sequence.digests):
            return False
        digest = sequence.digests[num_found]
        return any(
            self.cache.is_computing(other, num_found, digest)
            for prefills in (draft.prefills, *(step.prefills for step in self._in_flight))
            for other, _ in prefills
            if not other.is_finished
        )

    def _has_room_to_admit(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Room for all tokens it has now; and, if it was preempted too often, for all it can ever have."""
        num_needed = self.cache.num_blocks_to_admit(sequence, prefix)
        if self._needs_guarantee(sequence):
            num_needed += self._num_worst_case_blocks(sequence) - self.cache.num_blocks_for(sequence.num_tokens)
        if self._batch.running:
            num_needed += self._num_watermark_blocks
        return num_needed <= self.cache.num_available_blocks()

    def _enter_batch(self, draft: Draft, sequence: Sequence, active: ActiveRequest, prefix: list[int]) -> None:
        self.cache.adopt(sequence, prefix)
        if self._needs_guarantee(sequence):
            sequence.is_guaranteed = True
            self.cache.reserve(sequence, self._num_worst_case_blocks(sequence) - len(prefix))
        self._batch.enter(sequence, self._batch.hold_slot())
        active.child_slots = [self._batch.hold_slot() for _ in range(active.num_unborn)]
        self._batch.prefilling.append(sequence)
        sequence.become(State.RUNNING)

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

    def _plan_chunk(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        """A row of `num_tokens` for a prefilling sequence; if it lacks no more, it samples and goes on to decode, or
        reports its candidates for first beams."""
        draft.add_prefill(sequence, num_tokens)
        if sequence.num_uncomputed_tokens:
            return
        self._batch.prefilling.remove(sequence)
        if sequence.is_beam:
            draft.leaders.append(sequence)
            return
        self._start_decoding(draft, sequence)
        active = self._requests[sequence.request.request_id]
        while active.num_unborn:
            self._start_decoding(draft, self._fork(draft, sequence, active))

    def _start_decoding(self, draft: Draft, sequence: Sequence) -> None:
        self._batch.start_decoding(sequence)
        draft.add_completed(sequence)

    def _fork(self, draft: Draft, parent: Sequence, active: ActiveRequest) -> Sequence:
        """The next sample of a request: shares every block of the first, and samples from the same logits."""
        child = Sequence(parent.request, index=len(active.sequences), arrival=parent.arrival)
        self.cache.fork(parent, child)
        child.state = State.RUNNING
        self.counters.num_forks += 1
        child.row_count = 1
        active.sequences.append(child)
        self._batch.enter(child, active.child_slots.pop(0))
        draft.forks.append(Fork(parent.slot, child.slot, child.params.seed))
        return child

    def _seal(self, draft: Draft) -> StepPlan:
        scheduled = dict(draft.prefills)
        for sequence, num_tokens in draft.prefills:
            draft.set_row_count(sequence, num_tokens)
        for sequence in self._batch.prefilling:
            if sequence not in scheduled:
                draft.set_row_count(sequence, 0)
        self.step_id += 1
        plan, step = draft.seal(
            self.epoch, self.step_id, self._batch.retired_slots, has_reporting=self._batch.num_reporting > 0
        )
        self._batch.retired_slots = []
        for sequence in draft.ending:  # the executor hears of it with the next plan: this one computes their last row
            self._batch.retire(sequence)
        self._in_flight.append(step)
        self.counters.num_steps += 1
        self.counters.num_cow_copies += len(draft.block_copies) // 2
        return plan

    def _allocate(self, sequence: Sequence, num_tokens: int) -> Allocation:
        """Blocks for tokens that were found to have room."""
        allocation = self.cache.try_allocate(sequence, num_tokens)
        if allocation is None:
            raise InvariantViolation(f"no blocks for {sequence!r}, though there was room")
        return allocation

    # --- a step: commit ---------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> Events:
        """Takes in what the oldest plan in flight came to. Raises ResultMismatch, changing nothing, if it cannot be."""
        step = self._check_result(result)
        self._in_flight.popleft()
        events = Events()
        for sequence, num_cached in step.admitted:
            self._note_start(sequence, num_cached, events)
        for sequence, num_tokens in step.prefills:
            if not sequence.is_finished:
                sequence.num_computed_tokens += num_tokens
                if sequence.num_computed_tokens >= sequence.publish_at:
                    self.cache.publish(sequence)
        self._append_tokens(step, result, events)
        if result.logprobs is not None:
            add_logprobs(step, result.logprobs, events)
        if result.prompt_logprobs is not None:
            add_prompt_logprobs(step, result.prompt_logprobs, events)
        if result.candidates is not None:
            self._decide_beams(step, candidates_by_beam(step, result.candidates), events)
        self._end_sequences(step, result, events)
        for block_table in step.releases:
            self.cache.release(block_table)
        return events

    def _check_result(self, result: StepResult) -> Step:
        if not self._in_flight:
            raise ResultMismatch(f"result of step {result.step_id}, but no plan is in flight")
        step = self._in_flight[0]
        if (result.epoch, result.step_id) != (self.epoch, step.step_id):
            raise ResultMismatch(
                f"result of step {result.step_id} of epoch {result.epoch}, "
                f"but step {step.step_id} of epoch {self.epoch} is next"
            )
        for name, values in (("token_ids", result.token_ids), ("end_reasons", result.end_reasons)):
            if values is not None and len(values) != len(step.sampled):
                raise ResultMismatch(
                    f"step {step.step_id} sampled {len(step.sampled)} sequences, its result has {len(values)} {name}"
                )
        check_reports(step, result)
        return step

    def _note_start(self, sequence: Sequence, num_cached: int, events: Events) -> None:
        """The first admission is when a client's prompt tokens count as cached or not: a recompute is not a hit."""
        if sequence.index > 0 or sequence.num_cached_tokens is not None or sequence.is_finished:
            return
        sequence.num_cached_tokens = num_cached
        self.counters.num_prefix_queried_tokens += sequence.num_prompt_tokens
        self.counters.num_prefix_hit_tokens += num_cached
        events.started.append(sequence)

    def _append_tokens(self, step: Step, result: StepResult, events: Events) -> None:
        for sequence, token_id in zip(step.sampled, result.token_ids, strict=True):
            if sequence.state is State.FINISHED:
                continue  # overrun: it ended after this step was planned
            token_ids = sequence.token_ids
            sequence.num_computed_tokens = num_computed = len(token_ids)
            token_ids.append(token_id)
            if num_computed >= sequence.publish_at:
                self.cache.publish(sequence)
            events.sequences.append(sequence)
            events.token_ids.append(token_id)
        self.counters.num_generated_tokens += len(events.token_ids)

    def _decide_beams(self, step: Step, candidates: dict[Sequence, Candidates], events: Events) -> None:
        """Each group that reported goes on with the beams it has decided on, or has ended."""
        for beam in step.beams:
            if beam.is_finished:
                continue  # overrun: its request ended after this step was planned
            beam.num_computed_tokens = beam.num_planned_tokens
            if beam.num_computed_tokens >= beam.publish_at:
                self.cache.publish(beam)
        for leader in dict.fromkeys(beam.purse for beam in step.beams if not beam.is_finished):
            leader.show_progress()
            self._decide(self._requests[leader.request.request_id], candidates, events)

    def _decide(self, active: ActiveRequest, candidates: dict[Sequence, Candidates], events: Events) -> None:
        group = active.group
        if group is None:
            raise InvariantViolation(f"request {active.request.request_id} reported candidates, and is no beam search")
        leader = group.leader
        is_first = not group.beams
        dropped = group.decide(candidates)
        if is_first:
            self._batch.replace(leader, group.beams[0])
        if group.branches:
            self._drop_beams(active, dropped)
            self._batch.decided.append(group)
            return
        results = group.search.results()
        self.counters.num_generated_tokens += sum(len(result.token_ids) for result in results)
        for result in results[1:]:
            self.counters.num_finished[result.reason] += 1
        self._finish(leader, results[0].reason)
        events.beams.append((leader, results))

    def _drop_beams(self, active: ActiveRequest, dropped: list[Sequence]) -> None:
        """Nobody continues these. What they held is free at once: a group waits for its results, so no plan in flight
        reads or writes it. Their slots stay with the group, and so does the promise of a block for each."""
        for beam in dropped:
            active.child_slots.append(self._batch.vacate(beam))
            self.cache.release(beam.block_table)
            beam.state = State.FINISHED
            if beam.is_guaranteed and beam.num_planned_tokens % self._block_size:
                self.cache.reserve(beam.purse, 1)  # the last block was its own: a child of another beam will copy one

    def _end_sequences(self, step: Step, result: StepResult, events: Events) -> None:
        if result.end_reasons is not None:
            for sequence, reason in zip(step.sampled, result.end_reasons, strict=True):
                if reason is not None and not sequence.is_finished:
                    self._finish(sequence, reason)
                    events.finished.append((sequence, reason))
        for sequence in step.ending:
            if not sequence.is_finished:
                self._finish(sequence, FinishReason.LENGTH)
                events.finished.append((sequence, FinishReason.LENGTH))

    # --- transitions ------------------------------------------------------------------------------------------

    def _preempt(self, victim: Sequence) -> None:
        """Takes everything from a running sequence, or all beams of its group; it is computed again later. No plan is
        in flight."""
        if self._in_flight:
            raise InvariantViolation("preemption while plans are in flight")
        sequence = victim.purse
        self.counters.num_preemptions += 1
        self.counters.num_preempted_tokens += self._give_all_back(sequence)
        sequence.num_preemptions += 1
        sequence.become(State.PREEMPTED)
        self._waiting.add(sequence)

    def _give_all_back(self, sequence: Sequence) -> int:
        """Slots, blocks and promises; its tokens stay, beams do not. Returns the computed tokens that are lost."""
        num_lost = 0
        active = self._requests[sequence.request.request_id]
        for holder in active.holders(sequence):
            num_lost += holder.num_computed_tokens
            self._drop_from_batch(holder)
            self.cache.release(holder.block_table)
            holder.forget_kv()
        if active.group:
            self._forget_beams(active.group)
        sequence.forget_kv()
        return num_lost

    def _forget_beams(self, group: BeamGroup) -> None:
        if group in self._batch.decided:
            self._batch.decided.remove(group)
        group.restart()

    def _choose_victim(self) -> Sequence:
        candidates = [sequence for sequence in self._batch.running if not sequence.is_guaranteed]
        if not candidates:
            raise InvariantViolation("the pool is short, and every running sequence has its blocks promised")
        return max(candidates, key=self.policy.victim_order)

    def _needs_guarantee(self, sequence: Sequence) -> bool:
        """Preempted as often as a sequence may be: it runs again only with all its blocks promised."""
        return sequence.num_preemptions >= self.limits.max_preemptions

    def _num_worst_case_blocks(self, sequence: Sequence) -> int:
        """Blocks this sequence, or its beams, can come to hold; one more if samples will share, and copy, the last."""
        active = self._requests[sequence.request.request_id]
        if active.group:
            return active.group.num_worst_case_blocks(self.cache)
        num_unborn = active.num_unborn
        num_blocks = self.cache.num_blocks_for(sequence.params.max_total_tokens - 1) + (num_unborn > 0)
        return min(num_blocks, self.cache.pool.num_usable_blocks)

    def _end_request(self, request_id: int, reason: FinishReason) -> list[tuple[Sequence, FinishReason]]:
        active = self._requests.get(request_id)
        unfinished = [s for s in active.sequences if not s.is_finished] if active else []
        for sequence in unfinished:
            self._finish(sequence, reason)
        return [(sequence, reason) for sequence in unfinished]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        active = self._requests[sequence.request.request_id]
        if sequence.state is State.RUNNING:
            for holder in active.holders(sequence):
                self._drop_from_batch(holder)
                self._release_after_flight(holder.block_table)
                holder.block_table = []
                if holder is not sequence:
                    holder.state = State.FINISHED
            if active.group:
                self._forget_beams(active.group)
        else:
            self._waiting.remove(sequence)
        sequence.become(State.FINISHED)
        self.counters.num_finished[reason] += 1
        if active.has_ended:
            del self._requests[sequence.request.request_id]

    def _drop_from_batch(self, sequence: Sequence) -> None:
        """Out of the running set and its slot; what it holds in blocks is the caller's to release."""
        self._batch.drop(sequence)
        self.cache.cancel_reservation(sequence.purse)
        active = self._requests[sequence.request.request_id]
        for slot in active.child_slots:
            self._batch.return_slot(slot)
        active.child_slots = []

    def _release_after_flight(self, block_table: list[int]) -> None:
        """Plans in flight still write to these blocks, or copy from them: they stay taken until the newest is in."""
        if self._in_flight:
            self._in_flight[-1].releases.append(block_table)
        else:
            self.cache.release(block_table)

    # --- looking in -------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_prompt_tokens(self) -> int:
        return self._waiting.num_prompt_tokens

    @property
    def num_free_slots(self) -> int:
        return self._batch.num_free_slots

    @property
    def num_held_slots(self) -> int:
        """Slots kept for samples or beams to be born."""
        return sum(len(active.child_slots) for active in self._requests.values())

    def has_request(self, request_id: int) -> bool:
        """Whether a request has not ended."""
        return request_id in self._requests

    def waiting_sequences(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def newly_admitted(self) -> Iterator[Sequence]:
        """Of each request that the newest plan admits for the first time, the first sequence."""
        admitted = self._in_flight[-1].admitted if self._in_flight else []
        return (each for each, _ in admitted if each.index == 0 and each.num_cached_tokens is None)

    def running_sequences(self) -> Iterator[Sequence]:
        return iter(self._batch.running)

    def unfinished_sequences(self) -> Iterator[Sequence]:
        """Once a group has beams, they are what there is of it."""
        return (sequence for active in self._requests.values() for sequence in active.unfinished())

    def running_groups(self) -> Iterator[tuple[ActiveRequest, BeamGroup]]:
        """Beam searches that have beams."""
        return ((active, active.group) for active in self._requests.values() if active.group and active.group.beams)

    def undecided_beams(self) -> Iterator[Sequence]:
        """Beams with a row in a plan in flight."""
        return (beam for step in self._in_flight for beam in step.beams)

    def deferred_releases(self) -> Iterator[list[int]]:
        """Block tables of sequences that ended while plans in flight could still touch them."""
        return (block_table for step in self._in_flight for block_table in step.releases)
