"""The checks of the test harness: invariants, order, progress and coverage, after every move of the scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from scheduler.core import (
    CONTINUOUS,
    FCFS,
    PAGED,
    Batching,
    InvariantViolation,
    KVAllocation,
    Policy,
    Request,
    Scheduler,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepResult,
    check_invariants,
    kv_usage,
)
from scheduler.core.baselines.batching import ClosedBatch, batch_members
from scheduler.core.baselines.contiguous import ContiguousKVCache, run_length
from scheduler.core.inspect.views import deferred_releases, unfinished_sequences
from tests.support.core.budget_check import BudgetCheck
from tests.support.core.fake_clients import FakeClients
from tests.support.core.loss_record import LossRecord
from tests.support.core.step_bound import StepBound, most_blocks, most_preemptions
from tests.support.core.victim_check import check_victims

if TYPE_CHECKING:
    from tests.support.core.fake_executor import FakeExecutor


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A plan in flight, with the result that will come back, and the blocks that it can touch."""

    plan: StepPlan
    result: StepResult
    touched_blocks: frozenset[int]


@dataclass(slots=True)
class Coverage:
    """Counts of events that the scheduler does not count itself."""

    num_chunked_prefills: int = 0  # plans that leave a prompt partly computed
    num_guaranteed: int = 0  # admissions with the worst case reserved
    num_overruns: int = 0  # rows of sequences that had ended
    num_pipelined: int = 0  # plans that left while another was in flight
    num_shared_blocks: int = 0  # plans during which some block was in two tables
    num_waits_for_room: int = 0  # calls that planned nothing for lack of blocks
    num_deferred_releases: int = 0
    num_suspects: int = 0  # admissions that run alone
    num_beam_steps: int = 0  # plans with branches
    num_narrow_beams: int = 0  # such plans with fewer beams than the group has slots
    num_beams_beside: int = 0  # such plans that also have rows of other requests
    num_beams_behind: int = 0  # plans that left while a group waited for its candidates
    num_guaranteed_beams: int = 0
    num_preempted_beams: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    num_lost_flights: int = 0
    num_narrowed: int = 0  # open-ended requests that got a bound from a smaller pool
    num_ended_by_pool: int = 0  # sequences that had reached that bound
    num_external: int = 0  # results after which free runs were too short for the head of the queue
    num_batches: int = 0  # closed batches
    num_waits_for_batch: int = 0  # calls that planned nothing while a batch was filling
    num_shortened: int = 0  # plans that leave prompt tokens to later ones because of the target
    num_news: int = 0  # plans that compute nothing, and only publish or withdraw blocks
    num_retained_blocks: int = 0  # blocks that an epoch began with
    num_overtaken: int = 0  # times that a sequence which awaited a block was overtaken
    num_deferrals: int = 0  # sequences for whose token the executor did not wait
    num_late_beams: int = 0  # beams for whose candidates it did not wait
    num_pauses: int = 0  # plans that computed only a newcomer's prompt while others could have decoded


class CheckedScheduler:
    """A scheduler with a fake executor and fake clients, and the checks that involve all three."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        num_blocks: int,
        block_size: int,
        policy: Policy = FCFS,
        batching: Batching = CONTINUOUS,
        kv_allocation: KVAllocation = PAGED,
        vocab_size: int = 2,
        enable_prefix_caching: bool = True,
        retains: bool = False,
    ) -> None:
        self.retains = retains
        self.num_blocks = num_blocks
        self.batching = batching
        self.scheduler = Scheduler(
            limits,
            num_blocks=num_blocks,
            block_size=block_size,
            policy=policy,
            batching=batching,
            kv_allocation=kv_allocation,
            vocab_size=vocab_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        check_victims(self.scheduler)
        self.executor: FakeExecutor | None = None
        self.last_executor: FakeExecutor | None = None
        self.clients = FakeClients(vocab_size)
        self.in_flight: deque[Flight] = deque()
        self.num_lost_plans = 0  # that were in flight when the last executor was lost
        self.lost: list[Flight] = []  # sent to lost executors; their results may still arrive
        self.coverage = Coverage()
        self.budget_check = BudgetCheck()
        self.paused: set[int] = set()  # slots that got no row in the last plan, because a newcomer passed
        self.bound = StepBound(limits.max_preemptions)
        self.losses = LossRecord()
        self.now_s = 0.0
        self.arrivals_s: dict[int, float] = {}

    def check(self) -> None:
        check_invariants(self.scheduler)
        for flight in self.in_flight:
            free = [block for block in flight.touched_blocks if self.scheduler.state.cache.pool.ref_counts[block] == 0]
            if free:
                raise InvariantViolation(f"I6: plan {flight.plan.step_id} in flight can touch the free blocks {free}")
        self._check_retained()
        num_steps = self.scheduler.state.counters.num_steps - self.coverage.num_news
        assert num_steps <= self.bound.max_steps, f"I12: {num_steps} steps, the bound is {self.bound.max_steps}"
        for sequence in unfinished_sequences(self.scheduler.state):
            most = most_preemptions(self.scheduler.state.limits.max_preemptions, sequence.index)
            assert sequence.num_preemptions <= most, f"I14: {sequence!r} was preempted {sequence.num_preemptions} times"

    def _check_retained(self) -> None:
        """Checks I24: once all plans are executed, the executor has the digests that are in the index, and no others.

        Those that the next plan publishes or withdraws are the exception.
        """
        if self.executor is None or not self.retains:
            return
        index = self.scheduler.state.cache.index
        known = {block: digest for digest, block in index.items() if block not in index.published}
        kept = {block: digest for block, digest in self.executor.digests.items() if block not in index.withdrawn}
        assert kept == known, f"I24: the executor has the digests of {sorted(kept)}, the index those of {sorted(known)}"

    def _check_progress_is_possible(self) -> None:
        """Checks I12: if nothing is planned, a result, an executor, or the time of a batch or a deferred sequence is
        awaited."""
        if self.executor is None or self.in_flight or not self.scheduler.num_unfinished_requests:
            return
        state = self.scheduler.state
        times_s = (state.admission_queue.due_s, state.resume_s)
        due_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        assert due_s is not None, "I12: nothing is in flight and nothing is planned, but requests are unfinished"
        assert due_s > self.now_s, "I12: a batch or a deferred sequence waits for a time that has passed"

    def _check_order(self, plan: StepPlan, waiting_before: list[Sequence]) -> None:
        """Checks I13, I16 and I27.

        I13: no sequence overtakes another one, unless that awaits a block or is deferred; and none is admitted behind a
        first in line that cannot continue, unless it passes as a newcomer (I26). I16: a suspect runs beside no
        sequences except samples of its own request. I27: no deferred sequence is admitted before its pause has ended.
        """
        order = self.scheduler.state.policy.order
        running = set(self.scheduler.state.batch.running)
        admitted = [sequence for sequence in waiting_before if sequence in running]
        early = [sequence for sequence in admitted if sequence.resume_s > self.scheduler.state.now_s]
        assert not early, f"I27: {early} were admitted before their pauses had ended"
        if admitted:
            last = max(admitted, key=order)
            for waiting in self._admissible_sequences():
                later = [each for each in admitted if each.account is waiting.account and order(waiting) < order(each)]
                if later and self._awaits_block(waiting):
                    self.coverage.num_overtaken += 1
                    continue
                assert not later, f"I13: {later} overtook {waiting!r}"
            assert self._lets_newcomer_pass(plan) or self._first_in_line_has_row(order(last)), (
                f"I13: {last!r} was admitted behind a sequence that cannot continue"
            )
        if any(self._is_suspect(sequence) for sequence in running):
            num_requests = len({sequence.request.request_id for sequence in running})
            assert num_requests == 1, "I16: a suspect runs beside other requests"

    def _is_suspect(self, sequence: Sequence) -> bool:
        """Returns whether a sequence has to run alone. Clients of beam searches receive nothing that tells."""
        key = (sequence.request.request_id, sequence.index)
        return sequence.is_suspect if sequence.is_beam else self.losses.is_suspect(key, len(self.clients.received[key]))

    def _awaits_block(self, waiting: Sequence) -> bool:
        """Returns whether a plan in flight computes the next block of the prompt of a waiting sequence."""
        state = self.scheduler.state
        num_found, size = len(state.cache.find_prefix(waiting)), state.cache.block_size
        end = (num_found + 1) * size
        prefix = waiting.token_ids[:end]
        return waiting.num_tokens > end and any(
            other.request.cache_salt == waiting.request.cache_salt
            and other.token_ids[:end] == prefix
            and other.num_computed_tokens < end <= other.num_planned_tokens
            for step in state.in_flight
            for other in step.prefills
            if not other.is_finished
        )

    def _admissible_sequences(self) -> list[Sequence]:
        """Returns the waiting sequences that may be admitted: all, or those of members of the closed batch."""
        members = set(batch_members(self.scheduler.state))
        is_closed = isinstance(self.scheduler.state.admission_queue, ClosedBatch)
        return [s for s in self.scheduler.state.waiting if not is_closed or s.request.request_id in members]

    def _check_batch(self, members_before: list[int], waiting_before: list[Sequence]) -> None:
        """Checks I20: a closed batch keeps its members until all have ended.

        Then the next batch is formed from the head of the queue, when it is full or when the first of its requests to
        arrive has waited long enough.
        """
        scheduler, members = self.scheduler, batch_members(self.scheduler.state)
        if members_before or not isinstance(scheduler.state.admission_queue, ClosedBatch):
            assert members == members_before, f"I20: the batch {members_before} became {members}"
            return
        num_slots, head, is_full = 0, [], False
        for request in {sequence.request.request_id: sequence.request for sequence in waiting_before}.values():
            num_slots += request.beam.width if request.beam else request.num_sequences
            is_full |= num_slots >= scheduler.state.limits.max_num_seqs
            if num_slots <= scheduler.state.limits.max_num_seqs:
                head.append(request.request_id)
        due_s = min((self.arrivals_s[request_id] for request_id in head), default=inf) + self.batching.timeout_s
        if members:
            self.coverage.num_batches += 1
            assert members == head, f"I20: the batch {members} is not the head of the queue, {head}"
            assert is_full or due_s <= self.now_s, f"I20: the batch {members} was formed too early"
        elif waiting_before:
            self.coverage.num_waits_for_batch += 1
            assert not is_full, f"I20: no batch was formed of {head}, though it is full"
            assert due_s > self.now_s, f"I20: no batch was formed of {head}, though the first has waited until {due_s}"

    def _first_in_line_has_row(self, before: tuple[int, ...]) -> bool:
        """Returns whether the first sequence in order, if its key is below `before`, has a row in the newest plan.

        Late beams pause, and others may enter meanwhile (I27).
        """
        assert self.executor is not None
        order, sampled = self.scheduler.state.policy.order, self.scheduler.state.in_flight[-1].sampled
        seated = [s for s in self.scheduler.state.batch.running if s.slot >= 0 or s in sampled]
        first = min(seated, key=order, default=None)
        if first is None or order(first) >= before or first in sampled:
            return True
        slot = self.executor.slots[first.slot]
        return slot.row_count > 0 or slot.is_undecided or slot.is_late  # beams continue when their results arrive

    def _check_decodes(self, plan: StepPlan, sampling_before: set[int]) -> None:
        """Checks I15: a slot that sampled in the last plan has a row in this one, unless it was retired.

        And I26: nor has it if a newcomer passes, and then it has a row in the plan after this one.
        """
        assert self.executor is not None
        starved = (sampling_before | self.paused) - set(plan.retired_slots) - self.executor.sampled_slots
        paused_before, self.paused = self.paused, set()
        if starved and not paused_before and self._lets_newcomer_pass(plan):
            self.coverage.num_pauses += 1
            self.paused = starved
            return
        assert not starved & paused_before, f"I26: slots {sorted(starved & paused_before)} pause twice in a row"
        assert not starved, f"I15: slots {sorted(starved)} were decoding and got no row"

    def _lets_newcomer_pass(self, plan: StepPlan) -> bool:
        """Returns whether the newest plan has one row, of a new sequence whose tenant has no other one (I26)."""
        state = self.scheduler.state
        if plan.num_sequences != 1 or len(plan.admissions) != 1 or not state.costs.token_s:
            return False
        newcomer = state.in_flight[-1].admitted[0][0]
        others = (other for other in state.batch.running if other.request is not newcomer.request)
        return all(other.account is not newcomer.account for other in others)

    def _check_beams(self, plan: StepPlan) -> None:
        """Checks I19 and I27.

        I19: a decided group has a row for each of its beams in the next plan. I27: a late beam has one when its pause
        has ended, and not before.
        """
        state = self.scheduler.state
        groups = [state.active(beam).group for beam in state.in_flight[-1].beams]
        early = [group.leader for group in groups if group and group.resume_s > state.now_s]
        assert not early, f"I27: {early} were planned before their pauses had ended"
        overdue = [group.leader for group in state.batch.paused if group.resume_s <= state.now_s]
        assert not overdue or self._lets_newcomer_pass(plan), f"I27: {overdue} go on pausing"
        beams = [sequence for sequence in self.scheduler.state.batch.running if sequence.leader is not sequence]
        branched = set(plan.branches[::3])
        assert not self.scheduler.state.batch.decided, "I19: a decided group was not planned"
        self.coverage.num_beam_steps += bool(branched)
        self.coverage.num_beams_behind += any(beam.slot not in branched for beam in beams)
        if branched:
            widths = {beam.request.request_id: beam.request.beam.width for beam in beams if beam.request.beam}
            self.coverage.num_narrow_beams += sum(widths.values()) > len(beams)
            self.coverage.num_beams_beside += plan.num_sequences > len(branched)
            self.coverage.num_guaranteed_beams += any(beam.is_guaranteed for beam in beams)

    def _check_usage(self) -> None:
        """Checks that `kv_usage` agrees with the pool."""
        pool, index, usage = self.scheduler.state.cache.pool, self.scheduler.state.cache.index, kv_usage(self.scheduler)
        assert usage.num_active_blocks == pool.num_usable_blocks - pool.num_free_blocks
        assert usage.num_cached_blocks == sum(block in index for block in pool.free_blocks())
        assert usage.num_cached_blocks + usage.num_free_blocks == pool.num_free_blocks
        assert usage.num_shared_blocks == sum(num_refs > 1 for num_refs in pool.ref_counts)
        num_running = sum(1 for _ in self.scheduler.state.batch.running)
        assert usage.num_reserved_token_slots + usage.num_internal_token_slots == usage.num_wasted_token_slots
        assert min(usage.num_reserved_token_slots, usage.num_internal_token_slots, usage.num_external_token_slots) >= 0
        self.coverage.num_external += usage.num_external_token_slots > 0
        if isinstance(self.scheduler.state.cache, ContiguousKVCache):
            assert self.scheduler.state.counters.num_preemptions == 0, "I21: a sequence was preempted"
            assert usage.num_external_token_slots <= pool.num_free_blocks * self.scheduler.state.cache.block_size
        else:
            assert usage.num_wasted_token_slots <= num_running * (self.scheduler.state.cache.block_size - 1), (
                "a block too many"
            )
            assert usage.num_external_token_slots == 0

    def _num_group_preemptions(self) -> int:
        leaders = {sequence.leader for sequence in unfinished_sequences(self.scheduler.state) if sequence.is_beam}
        return sum(leader.num_preemptions for leader in leaders)

    def _sampling_slots(self) -> set[int]:
        return set(self.executor.sampled_slots) if self.executor else set()

    def _waits_for_room(self) -> bool:
        return 0 < len(self.in_flight) < self.scheduler.state.limits.max_in_flight and any(
            sequence.slot >= 0 for sequence in self.scheduler.state.batch.running
        )

    def _observe(self, waiting_before: list[Sequence]) -> None:
        coverage, running = self.coverage, set(self.scheduler.state.batch.running)
        coverage.num_chunked_prefills += any(s.num_uncomputed_tokens for s in running if s.slot >= 0)
        coverage.num_shared_blocks += any(num_refs > 1 for num_refs in self.scheduler.state.cache.pool.ref_counts)
        coverage.num_deferred_releases += any(True for _ in deferred_releases(self.scheduler.state))
        for sequence in waiting_before:
            if sequence in running:
                coverage.num_guaranteed += sequence.is_guaranteed
                coverage.num_suspects += sequence.is_suspect

    def _check_is_beyond(self, sequence: Sequence) -> None:
        """Checks that a sequence ended by a smaller pool has all the tokens that this pool allows."""
        self.coverage.num_ended_by_pool += 1
        params = sequence.request.params
        assert sequence.request.is_open_ended, f"{sequence!r} is not open-ended"
        assert sequence.num_tokens >= max(self.scheduler.max_tokens_per_sequence, params.min_total_tokens)

    def _would_fit(self, request: Request) -> bool:
        num_wanted = request.params.max_total_tokens
        if request.is_open_ended:
            num_wanted = max(len(request.prompt_token_ids) + 1, request.params.min_total_tokens)
        num_blocks = max(run_length(self.scheduler.state.cache, request), most_blocks(request, self.scheduler))
        return num_wanted <= self.scheduler.max_tokens_per_sequence and num_blocks < self.num_blocks
