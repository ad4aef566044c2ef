"""The API of the scheduler core, a pure state machine that plans what the executor computes.

One step takes two calls:

    plan = scheduler.schedule()      what to compute, as changes since the step before; None: nothing for now
    events = scheduler.commit(result)

Up to `max_in_flight` plans are in flight at a time. A decode row means "the token this slot sampled last", so the next
plan can be sent before that token is known. Two rules keep this simple:

* A sequence that ends or is cancelled while plans are in flight keeps its blocks until the newest of them is committed.
* No sequence is preempted while plans are in flight. If blocks are short, the planner first waits for the results.

Beams are not planned ahead: the core decides which of them continue, so each step of a group (beams/group.py) waits for
the results of its last step. For the rest of the batch, a group's beams are additional decodes.

`Scheduler` is the API of the core. It changes a `SchedulerState` (state.py) through the functions in planning.py and
commit.py.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial
from math import inf

from scheduler.core.capacity import check_fits, fits, max_tokens_per_sequence
from scheduler.core.commit import commit
from scheduler.core.errors import InvariantViolation
from scheduler.core.fairness.run_time import RunTime
from scheduler.core.limits import SchedulerLimits
from scheduler.core.modes import CONTINUOUS, PAGED, Batching, KVAllocation
from scheduler.core.plan import Events, StepPlan, StepResult
from scheduler.core.planning import plan_step
from scheduler.core.policy import FCFS, Policy
from scheduler.core.request import Request
from scheduler.core.sequence import FinishReason
from scheduler.core.state import SchedulerState
from scheduler.core.tenants.account import TermsOf, equal_terms
from scheduler.core.timing.step_costs import StepCosts


class Scheduler:
    """Schedules requests on one executor at a time. Not thread-safe; every method returns at once.

    terms_of                 returns what the operator grants a tenant
    vocab_size               a result with a token id at or above it is refused; the default is the limit of int32
    batching, kv_allocation  anything but the default is for measurement only (scheduler/core/baselines)

    `state` is for reading; only this class and the core's own functions change it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        num_blocks: int,
        block_size: int,
        policy: Policy = FCFS,
        terms_of: TermsOf = equal_terms,
        batching: Batching = CONTINUOUS,
        kv_allocation: KVAllocation = PAGED,
        model_name: str = "",
        vocab_size: int = 1 << 31,
        enable_prefix_caching: bool = True,
    ) -> None:
        build_cache = partial(kv_allocation.build_cache, limits, block_size, model_name, enable_prefix_caching)
        build_queue = partial(batching.build_queue, batching.timeout_s)
        self.state = SchedulerState(limits, policy, terms_of, build_queue, build_cache, num_blocks, vocab_size)
        self.is_attached = False

    # --- steps ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Returns the next plan, or None if there is nothing to compute until a request or a result arrives."""
        if not self.is_attached or len(self.state.in_flight) >= self.state.limits.max_in_flight:
            return None
        return plan_step(self.state)

    def commit(self, result: StepResult) -> Events:
        """Commits the result of the oldest plan in flight. Raises ResultMismatch, changing nothing, for any other."""
        return commit(self.state, result)

    @property
    def num_in_flight(self) -> int:
        return len(self.state.in_flight)

    # --- requests ---------------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float = -inf) -> None:
        """Adds a request to the waiting queue; the scheduler then has to finish it.

        `now_s` is the time, as in `expire`; without it, the request arrives at the latest time passed to the core.

        Raises CapacityExceeded if the request can never fit, QueueFull if the queue is at its bound. Request ids are
        unique; prompts are not empty.
        """
        check_fits(self.state, request)
        self.state.waiting.check_takes(request)
        self.state.advance_clock(now_s)
        self.state.add(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request in any state. It is no error if the request has just ended by itself."""
        self.state.end_request(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: int, index: int) -> Events:
        """Ends one sequence because its text is complete (a stop string). It is no error if it has ended already.

        A sequence without a token has no text and continues, and so does a fork that is still in flight.
        """
        events = Events()
        active = self.state.requests.get(request_id)
        for sequence in active.sequences if active else ():
            has_text = sequence.num_tokens > sequence.num_prompt_tokens
            if sequence.index == index and has_text and not sequence.is_finished:
                self.state.finish(sequence)
                events.finished.append((sequence, FinishReason.STOP))
        return events

    def expire(self, now_s: float) -> Events:
        """Advances the core's time to `now_s`, and ends every waiting or running request whose deadline has come.

        Also returns the sequences that the last plans have ended because they could no longer meet their deadline.
        """
        self.state.advance_clock(now_s)
        events = Events(finished=self.state.missed)
        self.state.missed = []
        for request_id in self.state.deadlines.take_due(now_s):
            events.finished += self.state.end_request(request_id, FinishReason.DEADLINE)
        return events

    def set_run_time(self, run_time: RunTime) -> None:
        """Sets the estimate by which later plans end waiting requests that can no longer meet their deadline."""
        self.state.run_time = run_time

    def set_costs(self, costs: StepCosts) -> None:
        """Sets what steps cost, by which later plans take as many prompt tokens as the target of the limits allows."""
        self.state.costs = costs

    @property
    def next_wake_s(self) -> float | None:
        """The latest time to call `expire` and `schedule` again if nothing else happens; None: no such time."""
        state = self.state
        if state.missed:
            return state.now_s
        due_s = (state.deadlines.next_s, state.admission_queue.due_s, state.resume_s)
        return min((time_s for time_s in due_s if time_s is not None), default=None)

    def has_request(self, request_id: int) -> bool:
        """Returns whether a request has been added and has not ended."""
        return request_id in self.state.requests

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.state.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.state.waiting)

    @property
    def max_tokens_per_sequence(self) -> int:
        """The most tokens, prompt and output, that one sequence can reach."""
        return max_tokens_per_sequence(self.state)

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that no running sequence holds; returns the number of blocks.

        The next plan withdraws them from the executor. Without an executor, the next epoch starts without any.
        """
        self.state.must_forget |= not self.is_attached
        return self.state.cache.forget_prefixes()

    # --- executors --------------------------------------------------------------------------------------------

    def executor_attached(
        self, epoch: int, num_blocks: int, retained: SequenceOf[tuple[int, bytes]] | None = None
    ) -> Events:
        """Begins a new epoch, with an executor that has a pool of `num_blocks`.

        `retained` are the (block, digest) that the executor has kept, which become cached prefixes; None: this executor
        keeps none, and is not told of published blocks.

        If this pool is smaller than the last, it lowers the bound of open-ended requests. Returns the sequences that
        have ended because they reached the new bound, and those of requests that can never fit, which fail with
        CAPACITY.
        """
        state = self.state
        if epoch <= state.epoch:
            raise ValueError(f"epoch {epoch} is not after {state.epoch}")
        if self.is_attached:
            raise InvariantViolation("an executor is attached already")
        state.start_epoch(epoch, num_blocks)
        if retained is not None:
            state.cache.restore(retained)
        if state.must_forget:
            state.cache.forget_prefixes()
            state.must_forget = False
        self.is_attached = True
        events = Events()
        for active in list(state.requests.values()):
            request = active.request
            if request.is_open_ended and request.params.max_total_tokens > self.max_tokens_per_sequence:
                events.finished += state.narrow(active, self.max_tokens_per_sequence)
            if not active.has_ended and not fits(state, active.request):
                events.finished += state.end_request(request.request_id, FinishReason.CAPACITY)
        return events

    def executor_lost(self, now_s: float = -inf) -> Events:
        """Returns running sequences to the queue with their tokens. All KV blocks count as lost, until an executor
        attaches that has retained some.

        `now_s` is the time, as in `add`. Returns the sequences that fail because several executors in a row were lost
        while they ran.
        """
        if not self.is_attached:
            return Events()
        self.is_attached = False
        self.state.advance_clock(now_s)
        return Events(finished=self.state.lose_executor())
