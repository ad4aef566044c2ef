"""The scheduler core: a pure state machine. It decides; the executor computes.

One step is a sentence:

    plan = scheduler.schedule()      what to compute, as a difference to the step before; None: nothing, for now
    events = scheduler.commit(result)

Up to `max_in_flight` plans are out. A decode row means "the token this slot sampled last", so the next plan leaves
before that token is known. Two rules keep this simple:

* What ends or is cancelled while plans are in flight keeps its blocks until the newest of them is committed.
* Nobody is preempted while plans are in flight: a short pool first waits for their results, which may end somebody.

Beams are the exception to planning ahead: which of them go on is decided here, so each step of a group (beam_group.py)
waits for the results of its last. To the rest of the batch it is one more decode, or several.

This is the front door. What it knows stands in books.py; how a step is put together in planner.py, how a result is
taken in in committer.py.
"""

from collections.abc import Iterator
from math import inf

from scheduler.core.active_request import ActiveRequest
from scheduler.core.batching import CONTINUOUS, Batching
from scheduler.core.beam_group import BeamGroup
from scheduler.core.books import Books
from scheduler.core.capacity import check_fits, check_queue_takes, fits, max_tokens_per_sequence
from scheduler.core.committer import Committer
from scheduler.core.draft import Step
from scheduler.core.errors import InvariantViolation
from scheduler.core.kv_cache import KVCache
from scheduler.core.limits import Limits
from scheduler.core.memory import PAGED, Memory
from scheduler.core.plan import Events, StepPlan, StepResult
from scheduler.core.planner import Planner
from scheduler.core.policy import FCFS, Policy
from scheduler.core.request import Request
from scheduler.core.sequence import FinishReason, Sequence
from scheduler.core.stats import Counters


class Scheduler:
    """See the module. Not thread-safe; no clock, no I/O; every method returns at once.

    vocab_size        a result with a token id that is not below it is refused; the default is what int32 can hold
    batching, memory  other than the default: for measurement only (batching.py, memory.py)

    `books` and `planner` are for the core's own modules and its tests.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        policy: Policy = FCFS,
        batching: Batching = CONTINUOUS,
        memory: Memory = PAGED,
        model_name: str = "",
        vocab_size: int = 1 << 31,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.books = Books(
            limits,
            policy,
            batching,
            memory,
            num_blocks=num_blocks,
            block_size=block_size,
            model_name=model_name,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.planner = Planner(self.books)
        self._committer = Committer(self.books, vocab_size)
        self.is_attached = False

    # --- a step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or nothing before another result is in."""
        if not self.is_attached or self.num_in_flight >= self.limits.max_in_flight:
            return None
        return self.planner.plan()

    def commit(self, result: StepResult) -> Events:
        """Takes in what the oldest plan in flight came to. Raises ResultMismatch, changing nothing, if it cannot be."""
        return self._committer.commit(result)

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float = -inf) -> None:
        """Takes a request into the waiting queue, and with that the duty to finish it. `now_s` as in `expire`; without
        it, the request arrives at the latest time that was told.

        Raises CapacityExceeded if it can never fit, QueueFull if the queue is at its bound. Request ids are unique;
        prompts are not empty.
        """
        check_fits(request, self.limits, self.cache)
        check_queue_takes(request, self.limits, self.books.waiting)
        self.books.tell_time(now_s)
        self.books.add(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request in whatever state it is. One that has ended already is no error: the two may cross."""
        self.books.end_request(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: int, index: int) -> Events:
        """Ends one sequence because its text is complete (a stop string). Too late is no error.

        A sequence without a token has no text: it goes on, and so does a fork that is still in flight.
        """
        events = Events()
        active = self.books.requests.get(request_id)
        for sequence in active.sequences if active else ():
            has_text = sequence.num_tokens > sequence.num_prompt_tokens
            if sequence.index == index and has_text and not sequence.is_finished:
                self.books.finish(sequence, FinishReason.STOP)
                events.finished.append((sequence, FinishReason.STOP))
        return events

    def expire(self, now_s: float) -> Events:
        """It is `now_s`: ends every request whose deadline is not after that, waiting or running."""
        self.books.tell_time(now_s)
        events = Events()
        for request_id in self.books.deadlines.take_due(now_s):
            events.finished += self.books.end_request(request_id, FinishReason.DEADLINE)
        return events

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        return self.books.deadlines.next_s

    @property
    def next_wake_s(self) -> float | None:
        """When to call `expire` and `schedule` at the latest, though nothing happens: a deadline, or a batch that is
        waited for no longer."""
        due_s = (self.next_deadline_s, self.books.cohort.due_s)
        return min((time_s for time_s in due_s if time_s is not None), default=None)

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix that no running sequence holds; returns the number of blocks."""
        return self.cache.forget_prefixes()

    # --- executors come and go --------------------------------------------------------------------------------

    def executor_attached(self, epoch: int, num_blocks: int) -> Events:
        """An executor with an empty pool of `num_blocks` takes part from now on, in a new epoch.

        If this pool is smaller than the last, open-ended requests get the bound that it leaves. Returns the sequences
        that are beyond it, which have ended, and the requests that can never fit, which fail with CAPACITY.
        """
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} is not after {self.epoch}")
        if self.is_attached:
            raise InvariantViolation("an executor is attached already")
        self.books.start_epoch(epoch, num_blocks)
        self.is_attached = True
        events = Events()
        for active in list(self.books.requests.values()):
            request = active.request
            if request.is_open_ended and request.params.max_total_tokens > self.max_tokens_per_sequence:
                events.finished += self.books.narrow(active, self.max_tokens_per_sequence)
            if not active.has_ended and not fits(active.request, self.limits, self.cache):
                events.finished += self.books.end_request(request.request_id, FinishReason.CAPACITY)
        return events

    def executor_lost(self, now_s: float = -inf) -> Events:
        """The executor, or the way to it, is gone, and every KV block with it. What ran waits again, tokens kept.
        `now_s` as in `add`.

        Returns the sequences given up because executor after executor was lost under them.
        """
        if not self.is_attached:
            return Events()
        self.is_attached = False
        self.books.tell_time(now_s)
        return Events(finished=self.books.lose_executor())

    # --- looking in -------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self.books.limits

    @property
    def policy(self) -> Policy:
        return self.books.policy

    @property
    def batching(self) -> Batching:
        return self.books.batching

    @property
    def memory(self) -> Memory:
        return self.books.memory

    @property
    def counters(self) -> Counters:
        return self.books.counters

    @property
    def cache(self) -> KVCache:
        """Of this epoch."""
        return self.books.cache

    @property
    def epoch(self) -> int:
        return self.books.epoch

    @property
    def step_id(self) -> int:
        """Of the newest plan of this epoch; 0: there is none."""
        return self.books.step_id

    @property
    def max_tokens_per_sequence(self) -> int:
        """Most tokens (prompt and output) that one sequence can reach. The KV of the last one is never needed."""
        return max_tokens_per_sequence(self.limits, self.cache)

    @property
    def num_in_flight(self) -> int:
        return len(self.books.in_flight)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.books.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.books.waiting)

    @property
    def num_waiting_prompt_tokens(self) -> int:
        return self.books.waiting.num_prompt_tokens

    @property
    def num_free_slots(self) -> int:
        return self.books.batch.num_free_slots

    @property
    def num_held_slots(self) -> int:
        """Slots kept for samples or beams to be born."""
        return sum(len(active.child_slots) for active in self.books.requests.values())

    def has_request(self, request_id: int) -> bool:
        """Whether a request has not ended."""
        return request_id in self.books.requests

    def batch_members(self) -> list[int]:
        """The requests of the closed batch that runs, but for those that have ended; none under continuous batching."""
        return [active.request.request_id for active in self.books.cohort.members()]

    def waiting_sequences(self) -> Iterator[Sequence]:
        return iter(self.books.waiting)

    @property
    def newest_step(self) -> Step:
        """The newest plan in flight, with the sequences that it is about."""
        return self.books.in_flight[-1]

    def newly_admitted(self) -> Iterator[Sequence]:
        """Of each request that the newest plan admits for the first time, the first sequence."""
        in_flight = self.books.in_flight
        admitted = in_flight[-1].admitted if in_flight else []
        return (each for each, _ in admitted if each.index == 0 and each.num_cached_tokens is None)

    def running_sequences(self) -> Iterator[Sequence]:
        return iter(self.books.batch.running)

    def unfinished_sequences(self) -> Iterator[Sequence]:
        """Once a group has beams, they are what there is of it."""
        return (sequence for active in self.books.requests.values() for sequence in active.unfinished())

    def running_groups(self) -> Iterator[tuple[ActiveRequest, BeamGroup]]:
        """Beam searches that have beams."""
        return (
            (active, active.group) for active in self.books.requests.values() if active.group and active.group.beams
        )

    def undecided_beams(self) -> Iterator[Sequence]:
        """Beams with a row in a plan in flight."""
        return (beam for step in self.books.in_flight for beam in step.beams)

    def deferred_releases(self) -> Iterator[list[int]]:
        """Block tables of sequences that ended while plans in flight could still touch them."""
        return (block_table for step in self.books.in_flight for block_table in step.releases)
