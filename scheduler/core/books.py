"""The core's books: who waits, who runs, who holds what, what is in flight.

    planner.py     decides the next step     ┐
    committer.py   takes in a result         ├─ write what they decided here
    scheduler.py   requests, executors       ┘

Every change of a sequence's state is one method, and leaves the books balanced (docs/invariants.md).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.core.active_request import ActiveRequest
from scheduler.core.batch import Batch
from scheduler.core.beam_group import BeamGroup
from scheduler.core.cohort import Cohort
from scheduler.core.deadlines import Deadlines
from scheduler.core.errors import InvariantViolation
from scheduler.core.kv_cache import KVCache
from scheduler.core.sequence import FinishReason, Sequence, State
from scheduler.core.stats import Counters
from scheduler.core.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from scheduler.core.batching import Batching
    from scheduler.core.draft import Step
    from scheduler.core.limits import Limits
    from scheduler.core.memory import Memory
    from scheduler.core.policy import Policy
    from scheduler.core.request import Request

Ends = list[tuple[Sequence, FinishReason]]


class Books:
    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        batching: Batching,
        memory: Memory,
        *,
        num_blocks: int,
        block_size: int,
        model_name: str,
        enable_prefix_caching: bool,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.batching = batching
        self.memory = memory
        self.counters = Counters()
        self.requests: dict[int, ActiveRequest] = {}
        self.deadlines = Deadlines(self.requests)
        self.waiting = WaitingQueue(policy)
        self.cohort = Cohort(batching, policy, self.waiting, self.requests, limits.max_num_seqs)
        self._block_size = block_size
        self._model_name = model_name
        self._enable_prefix_caching = enable_prefix_caching
        self._num_arrivals = 0
        self.start_epoch(0, num_blocks)

    def start_epoch(self, epoch: int, num_blocks: int) -> None:
        """An empty pool, and nobody in the batch. Who ran before has been sent back to wait."""
        self.epoch = epoch
        self.step_id = 0
        self.cache = KVCache(
            num_blocks,
            self._block_size,
            self._model_name,
            enable_prefix_caching=self._enable_prefix_caching,
            memory=self.memory,
            max_model_len=self.limits.max_model_len,
        )
        growth_ratio = 0.0 if self.memory.is_contiguous else self.limits.watermark_ratio
        self.num_watermark_blocks = int(growth_ratio * num_blocks)
        self.in_flight: deque[Step] = deque()
        self.batch = Batch(self.limits.max_num_seqs)

    def active(self, sequence: Sequence) -> ActiveRequest:
        return self.requests[sequence.request.request_id]

    # --- into the queue, into the batch -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._num_arrivals += 1
        sequence = Sequence(request, index=0, arrival=self._num_arrivals)
        group = BeamGroup(sequence, request.beam) if request.beam else None
        active = ActiveRequest(request, [sequence], group=group, arrival_s=self.cohort.now_s)
        self.requests[request.request_id] = active
        self._queue(sequence)
        self.deadlines.add(request)

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """From the queue into the batch: a slot, slots for all that will be born of it, and the blocks of `prefix`."""
        active = self.active(sequence)
        self.waiting.remove(sequence)
        self.cache.adopt(sequence, prefix)
        self.batch.enter(sequence, self.batch.hold_slot())
        active.child_slots = [self.batch.hold_slot() for _ in range(active.num_unborn)]
        self.batch.prefilling.append(sequence)
        sequence.become(State.RUNNING)

    def fork(self, parent: Sequence) -> Sequence:
        """The next sample of a request: shares every block of the first."""
        active = self.active(parent)
        child = Sequence(parent.request, index=len(active.sequences), arrival=parent.arrival)
        self.cache.fork(parent, child)
        child.state = State.RUNNING
        child.row_count = 1
        active.sequences.append(child)
        self.batch.enter(child, active.child_slots.pop(0))
        return child

    def tell_time(self, now_s: float) -> None:
        self.cohort.now_s = max(self.cohort.now_s, now_s)

    def _queue(self, sequence: Sequence) -> None:
        sequence.queued_s = self.cohort.now_s
        self.waiting.add(sequence)

    # --- back into the queue ----------------------------------------------------------------------------------

    def preempt(self, victim: Sequence) -> None:
        """Takes everything from a running sequence, or all beams of its group; it is computed again later. No plan is
        in flight."""
        if self.in_flight:
            raise InvariantViolation("preemption while plans are in flight")
        sequence = victim.leader
        self.counters.num_preemptions += 1
        self.counters.num_preempted_tokens += self._give_all_back(sequence)
        sequence.num_preemptions += 1
        sequence.become(State.PREEMPTED)
        self._queue(sequence)

    def lose_executor(self) -> Ends:
        """What ran waits again, tokens kept. Returns the sequences given up because executor after executor was lost
        under them."""
        ends: Ends = []
        self.in_flight.clear()
        for sequence in dict.fromkeys(running.leader for running in self.batch.running):
            self._give_all_back(sequence)
            sequence.count_loss()
            sequence.become(State.WAITING)
            self._queue(sequence)
            if sequence.num_losses > self.limits.max_losses:
                self.finish(sequence, FinishReason.ERROR)
                ends.append((sequence, FinishReason.ERROR))
        self.start_epoch(self.epoch, self.cache.pool.num_blocks)
        return ends

    def narrow(self, active: ActiveRequest, max_total_tokens: int) -> Ends:
        """A request that waits may reach no more than so many tokens. Returns the sequences that have got so far, and
        as far as they have to: they have ended."""
        params = replace(active.request.params, max_total_tokens=max_total_tokens)
        active.request = replace(active.request, params=params)
        num_enough = max(max_total_tokens, params.min_total_tokens)
        ends: Ends = []
        for sequence in active.sequences:
            sequence.request = active.request
            sequence.params = replace(sequence.params, max_total_tokens=max_total_tokens)
            has_output = sequence.num_tokens > sequence.num_prompt_tokens
            if not sequence.is_finished and has_output and sequence.num_tokens >= num_enough:
                self.finish(sequence, FinishReason.LENGTH)
                ends.append((sequence, FinishReason.LENGTH))
        if active.group:
            active.group.restart()
        return ends

    def _give_all_back(self, sequence: Sequence) -> int:
        """Slots, blocks and promises; its tokens stay, beams do not. Returns the computed tokens that are lost."""
        num_lost = 0
        active = self.active(sequence)
        for holder in active.holders(sequence):
            num_lost += holder.num_computed_tokens
            self._drop_from_batch(holder)
            self.cache.release(holder.block_table)
            holder.forget_kv()
        if active.group:
            self._forget_beams(active.group)
        sequence.forget_kv()
        return num_lost

    # --- ends -------------------------------------------------------------------------------------------------

    def end_request(self, request_id: int, reason: FinishReason) -> Ends:
        """In whatever state it is. One that has ended already is no error."""
        active = self.requests.get(request_id)
        unfinished = [s for s in active.sequences if not s.is_finished] if active else []
        for sequence in unfinished:
            self.finish(sequence, reason)
        return [(sequence, reason) for sequence in unfinished]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        active = self.active(sequence)
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
            self.waiting.remove(sequence)
        sequence.become(State.FINISHED)
        if active.has_ended:
            del self.requests[sequence.request.request_id]

    def drop_beams(self, active: ActiveRequest, dropped: list[Sequence]) -> None:
        """Nobody continues these. What they held is free at once: a group waits for its results, so no plan in flight
        reads or writes it. Their slots stay with the group, and so does the promise of a block for each."""
        for beam in dropped:
            active.child_slots.append(self.batch.vacate(beam))
            self.cache.release(beam.block_table)
            beam.state = State.FINISHED
            if beam.is_guaranteed and beam.num_planned_tokens % self._block_size:
                self.cache.reserve(beam.leader, 1)  # the last block was its own: a child of another beam will copy one

    def _forget_beams(self, group: BeamGroup) -> None:
        if group in self.batch.decided:
            self.batch.decided.remove(group)
        group.restart()

    def _drop_from_batch(self, sequence: Sequence) -> None:
        """Out of the running set and its slot; what it holds in blocks is the caller's to release."""
        self.batch.drop(sequence)
        self.cache.cancel_reservation(sequence.leader)
        active = self.active(sequence)
        for slot in active.child_slots:
            self.batch.return_slot(slot)
        active.child_slots = []

    def _release_after_flight(self, block_table: list[int]) -> None:
        """Plans in flight still write to these blocks, or copy from them: they stay taken until the newest is in."""
        if self.in_flight:
            self.in_flight[-1].releases.append(block_table)
        else:
            self.cache.release(block_table)
