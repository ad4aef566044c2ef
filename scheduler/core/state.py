"""The state of the scheduler: which requests wait, which run, what each holds, and which plans are in flight.

    admission.py   decides which request enters the batch   ┐
    planning.py    plans the next step                      ├─ change the state through the methods below
    commit.py      commits a result                         │
    scheduler.py   adds and ends requests                   ┘

Every change of a sequence's state is one method, after which the invariants hold (docs/invariants.md).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf

from scheduler.core.active_request import ActiveRequest
from scheduler.core.beams.group import BeamGroup
from scheduler.core.counters import Counters
from scheduler.core.errors import InvariantViolation
from scheduler.core.fairness.accounts import Accounts
from scheduler.core.fairness.fair_queue import FairQueue
from scheduler.core.fairness.run_time import RunTime
from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import SchedulerLimits
from scheduler.core.policy import Policy
from scheduler.core.request import Request
from scheduler.core.running_batch import RunningBatch
from scheduler.core.sequence import FinishReason, Sequence, State
from scheduler.core.step import Step
from scheduler.core.tenants.account import TermsOf
from scheduler.core.timing.deadlines import Deadlines
from scheduler.core.timing.pauses import pause_s
from scheduler.core.timing.step_budget import StepBudget
from scheduler.core.timing.step_costs import UNKNOWN_COSTS
from scheduler.core.waiting_queue import AdmissionQueue

Ends = list[tuple[Sequence, FinishReason]]


class SchedulerState:
    """The complete state of the scheduler.

    epoch    number of the current executor's epoch
    step_id  step id of the newest plan in this epoch; 0 before the first
    costs    what steps have cost, as the engine has measured it
    now_s    the latest time that was passed to the scheduler
    missed   sequences that the last plans have ended, because they would have started too late

    `must_forget` is True if an executor may have retained withdrawn blocks: the next epoch then starts without any.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        terms_of: TermsOf,
        build_queue: Callable[["SchedulerState"], AdmissionQueue],
        build_cache: Callable[[int], KVCache],
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.vocab_size = vocab_size
        self.counters = Counters()
        self.requests: dict[int, ActiveRequest] = {}
        self.deadlines = Deadlines(self.requests)
        self.now_s = -inf
        self.must_forget = False
        self.accounts = Accounts(terms_of)
        self.run_time = RunTime()
        self.costs = UNKNOWN_COSTS
        self.missed: Ends = []
        self.waiting = FairQueue(policy, limits, self.accounts, self.requests, lambda: (self.batch, self.cache))
        self.admission_queue = build_queue(self)
        self._build_cache = build_cache
        self._num_arrivals = 0
        self.start_epoch(0, num_blocks)

    def start_epoch(self, epoch: int, num_blocks: int) -> None:
        """Starts with an empty pool and an empty batch. Sequences that ran before have returned to the queue."""
        self.epoch = epoch
        self.step_id = 0
        self.cache = self._build_cache(num_blocks)
        self.in_flight = deque[Step]()
        self.batch = RunningBatch(self.limits.max_num_seqs)

    def new_budget(self) -> StepBudget:
        """Returns the budget of a step to which nothing was added."""
        return StepBudget(self.limits, self.costs)

    def active(self, sequence: Sequence) -> ActiveRequest:
        return self.requests[sequence.request.request_id]

    # --- into the queue, into the batch -----------------------------------------------------------------------

    def advance_clock(self, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)

    def add(self, request: Request) -> None:
        self._num_arrivals += 1
        account = self.accounts.request_added(request.tenant)
        num_known = len(request.outputs) or 1
        sequences = [Sequence(request, index, self._num_arrivals, account) for index in range(num_known)]
        group = BeamGroup(sequences[0], request.beam) if request.beam else None
        self.requests[request.request_id] = ActiveRequest(request, sequences, group=group, arrival_s=self.now_s)
        for sequence in sequences:
            if not sequence.is_finished:
                self._enqueue(sequence)
        self.deadlines.add(request)

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Moves a sequence into the batch, with the blocks of `prefix` and slots for itself and its later samples."""
        active = self.active(sequence)
        self.waiting.remove(sequence)
        self.cache.adopt(sequence, prefix)
        self.batch.enter(sequence, self.batch.hold_slot())
        active.child_slots = [self.batch.hold_slot() for _ in range(active.num_unborn)]
        self.batch.prefilling.append(sequence)
        sequence.become(State.RUNNING)

    def fork(self, parent: Sequence) -> Sequence:
        """Creates the next sample of a request; it shares every block of the first."""
        active = self.active(parent)
        child = Sequence(parent.request, len(active.sequences), parent.arrival, parent.account)
        self.cache.fork(parent, child)
        child.state = State.RUNNING
        child.is_charged = True
        child.row_count = 1
        active.sequences.append(child)
        self.batch.enter(child, active.child_slots.pop(0))
        return child

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.queued_s = self.now_s
        self.waiting.add(sequence)

    # --- back into the queue ----------------------------------------------------------------------------------

    def preempt(self, victim: Sequence) -> None:
        """Takes slots and blocks from a running sequence, or from all beams of its group, to compute it again later.

        Raises InvariantViolation if a plan is in flight.
        """
        if self.in_flight:
            raise InvariantViolation("preemption while plans are in flight")
        sequence = victim.leader
        self.waiting.left_behind = None
        self.counters.num_preemptions += 1
        self.counters.num_preempted_tokens += self._release_everything(sequence)
        sequence.num_preemptions += 1
        sequence.become(State.PREEMPTED)
        self._enqueue(sequence)

    def defer(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch for whose next token the executor did not wait.

        It ends, so that plans in flight do not matter to it, and a successor with its tokens returns to the queue
        after a pause, which doubles each time in a row.
        """
        successor = sequence.successor()
        successor.queued_s = self.now_s
        successor.resume_s = self.now_s + pause_s(successor.num_deferrals)
        siblings = self.active(sequence).sequences
        siblings[siblings.index(sequence)] = successor
        self.finish(sequence)
        self.waiting.pause(successor)
        self.counters.num_deferrals += 1

    def defer_beams(self, group: BeamGroup) -> None:
        """Lets the late beams of a group pause in their slots, because they cannot go on from their tokens alone."""
        group.num_deferrals += 1
        group.resume_s = self.now_s + pause_s(group.num_deferrals)
        self.batch.paused.append(group)
        self.counters.num_deferrals += len(group.late)

    @property
    def resume_s(self) -> float | None:
        """The next time at which a pause ends; None if there is none. Ended pauses wait for the next plan."""
        ends_s = [each.resume_s for each in self.waiting.paused] + [each.resume_s for each in self.batch.paused]
        return min((end_s for end_s in ends_s if end_s > self.now_s), default=None)

    def lose_executor(self) -> Ends:
        """Returns running sequences to the queue with their tokens.

        Returns the sequences that fail because several executors in a row were lost while they ran.
        """
        ends: Ends = []
        self.must_forget |= bool(self.cache.index.withdrawn) or any(step.withdraws for step in self.in_flight)
        self.in_flight.clear()
        for sequence in dict.fromkeys(running.leader for running in self.batch.running):
            sequence.count_loss(self.active(sequence).holders(sequence)[0].num_tokens)
            self._release_everything(sequence)
            sequence.become(State.WAITING)
            self._enqueue(sequence)
            if sequence.num_losses > self.limits.max_losses:
                self.finish(sequence)
                ends.append((sequence, FinishReason.EXECUTORS_LOST))
        self.start_epoch(self.epoch, self.cache.pool.num_blocks)
        return ends

    def narrow(self, active: ActiveRequest, max_total_tokens: int) -> Ends:
        """Lowers the bound of a waiting request. Ends and returns its sequences that have reached the new bound."""
        params = replace(active.request.params, max_total_tokens=max_total_tokens)
        active.request = replace(active.request, params=params)
        num_enough = max(max_total_tokens, params.min_total_tokens)
        ends: Ends = []
        for sequence in active.sequences:
            sequence.request = active.request
            sequence.params = replace(sequence.params, max_total_tokens=max_total_tokens)
            has_output = sequence.num_tokens > sequence.num_prompt_tokens
            if not sequence.is_finished and has_output and sequence.num_tokens >= num_enough:
                self.finish(sequence)
                ends.append((sequence, FinishReason.LENGTH))
        if active.group:
            active.group.restart()
        return ends

    def _release_everything(self, sequence: Sequence) -> int:
        """Releases slots, blocks, reservations and beams, but not tokens. Returns the computed tokens that are lost."""
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
        """Ends a request in any state, and returns its sequences. It is no error if the request has ended already."""
        active = self.requests.get(request_id)
        unfinished = [s for s in active.sequences if not s.is_finished] if active else []
        for sequence in unfinished:
            self.finish(sequence)
        return [(sequence, reason) for sequence in unfinished]

    def finish(self, sequence: Sequence) -> None:
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
            self.accounts.settle(sequence)
        sequence.become(State.FINISHED)
        if active.has_ended:
            del self.requests[sequence.request.request_id]
            self.accounts.request_ended(sequence.account)

    def drop_beams(self, active: ActiveRequest, dropped: list[Sequence]) -> None:
        """Ends beams that have no continuation; their slots and reserved blocks stay with the group.

        Their blocks are free at once: a group waits for its results, so no plan in flight reads or writes them.
        """
        for beam in dropped:
            active.child_slots.append(self.batch.vacate(beam))
            self.cache.release(beam.block_table)
            beam.state = State.FINISHED
            if beam.is_guaranteed and beam.num_planned_tokens % self.cache.block_size:
                # The last block belonged to this beam alone; a child of another beam will copy a block in its place.
                self.cache.reserve(beam.leader, 1)

    def _forget_beams(self, group: BeamGroup) -> None:
        for groups in (self.batch.decided, self.batch.paused):
            if group in groups:
                groups.remove(group)
        group.restart()

    def _drop_from_batch(self, sequence: Sequence) -> None:
        """Removes a sequence from the batch and frees its slots. The caller releases its blocks."""
        self.batch.drop(sequence)
        self.cache.cancel_reservation(sequence.leader)
        active = self.active(sequence)
        for slot in active.child_slots:
            self.batch.return_slot(slot)
        active.child_slots = []

    def _release_after_flight(self, block_table: list[int]) -> None:
        """Releases blocks once the newest plan in flight is committed: until then plans may write or copy them."""
        if self.in_flight:
            self.in_flight[-1].releases.append(block_table)
        else:
            self.cache.release(block_table)
