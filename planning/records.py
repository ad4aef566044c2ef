"""Records of a simulation: one row per request, integrals over time, and samples for plots."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from scheduler.core import Counters, KVUsage, Scheduler, kv_usage

if TYPE_CHECKING:
    from planning.workload import Job
    from scheduler.core import Events
    from scheduler.core.inspect.step_load import StepLoad

_MAX_SAMPLES = 400
_FIRST_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment. `usage` is the core's count of the pool."""

    now_s: float
    num_running: int
    num_waiting: int
    num_ended: int
    num_output_tokens: int
    usage: KVUsage


@dataclass(slots=True)
class OpenRequest:
    """A request that has arrived and has not ended.

    planned_s      None: it is in no plan yet
    first_token_s  None: it has no token yet
    """

    job: Job
    planned_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


R = TypeVar("R", bound=OpenRequest)


@dataclass(slots=True)
class Requests:
    """The requests that have ended, in the order of their ends, one array per field; times in virtual seconds."""

    tenant: array[int] = field(default_factory=lambda: array("H"))
    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    planned_s: array[float] = field(default_factory=lambda: array("d"))
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: array[float] = field(default_factory=lambda: array("d"))
    num_prompt_tokens: array[int] = field(default_factory=lambda: array("L"))
    num_output_tokens: array[int] = field(default_factory=lambda: array("L"))
    num_cached_tokens: array[int] = field(default_factory=lambda: array("L"))
    num_preemptions: array[int] = field(default_factory=lambda: array("L"))

    def committed(
        self, open_requests: dict[int, R], now_s: float, planned_s: float, events: Events, *, has_first_tokens: bool
    ) -> tuple[list[R], list[R]]:
        """Records what a step has changed, and takes the requests that ended from the open ones.

        Returns the requests that got their first token of this server, and those that ended.
        """
        began = []
        for sequence in events.started:
            entry = open_requests[sequence.request.request_id]
            if entry.planned_s is None:
                entry.planned_s, entry.num_cached_tokens = planned_s, sequence.num_cached_tokens or 0
        if has_first_tokens:
            for sequence in events.sequences:
                if len(sequence.token_ids) == sequence.num_given_tokens + 1:
                    entry = open_requests[sequence.request.request_id]
                    began.append(entry)
                    if entry.first_token_s is None:
                        entry.first_token_s = now_s
        ended = []
        for sequence, _ in events.finished:
            entry = open_requests.pop(sequence.request.request_id)
            entry.num_preemptions += sequence.num_preemptions
            self._add(entry, now_s, sequence.num_tokens)
            ended.append(entry)
        return began, ended

    def _add(self, entry: OpenRequest, now_s: float, num_tokens: int) -> None:
        job = entry.job
        self.tenant.append(job.tenant)
        self.arrival_s.append(job.arrival_s)
        self.planned_s.append(now_s if entry.planned_s is None else entry.planned_s)
        self.first_token_s.append(now_s if entry.first_token_s is None else entry.first_token_s)
        self.end_s.append(now_s)
        self.num_prompt_tokens.append(job.num_prompt_tokens)
        self.num_output_tokens.append(num_tokens - job.num_prompt_tokens)
        self.num_cached_tokens.append(entry.num_cached_tokens)
        self.num_preemptions.append(entry.num_preemptions)


class Records:
    """The records that a simulation fills. Integrals over virtual time, divided by the total time, are means.

    sequence_steps_s  number of sequences in a step x its duration
    waiting_s         length of the queue x time
    block_s           number of blocks that sequences hold x time. It counts as if it changed evenly during a leap,
                      which is right within a block for each sequence
    next_sample_s     time of the next sample; no leap goes beyond it
    """

    def __init__(self, num_usable_blocks: int, duration_s: float | None) -> None:
        self.requests = Requests()
        self.open: dict[int, OpenRequest] = {}
        self.samples: list[Sample] = []
        self.num_refused = 0
        self.busy_s = 0.0
        self.sequence_steps_s = 0.0
        self.waiting_s = 0.0
        self.block_s = 0.0
        self.max_running = 0
        self.max_waiting = 0
        self.num_leapt_steps = 0
        self.virtual_s = 0.0
        self.counters = Counters()
        self._num_usable_blocks = num_usable_blocks
        self._at_s = 0.0
        self._interval_s = _FIRST_INTERVAL_S if duration_s is None else duration_s / (_MAX_SAMPLES - 100)
        self.next_sample_s = 0.0

    @property
    def num_ended(self) -> int:
        return len(self.requests.end_s)

    # --- time -------------------------------------------------------------------------------------------------

    def step(self, now_s: float, started_s: float, load: StepLoad, scheduler: Scheduler) -> None:
        """Records a step from `started_s` to `now_s`, before it is committed."""
        self._busy(now_s - started_s, load.num_decodes + load.num_prefills)
        self.pass_until(now_s, scheduler)

    def leap(
        self,
        now_s: float,
        started_s: float,
        num_steps: int,
        num_decodes: int,
        num_free_blocks_before: int,
        scheduler: Scheduler,
    ) -> None:
        """Records several steps of the same sequences, without a pause between them."""
        self.num_leapt_steps += num_steps
        self._busy(now_s - started_s, num_decodes)
        self.block_s -= (now_s - started_s) * (num_free_blocks_before - scheduler.state.cache.pool.num_free_blocks) / 2
        self.pass_until(now_s, scheduler)

    def close(self, now_s: float, scheduler: Scheduler) -> None:
        self.pass_until(now_s, scheduler)
        self.virtual_s = now_s
        self.counters = scheduler.state.counters

    def pass_until(self, now_s: float, scheduler: Scheduler) -> None:
        """Records the time from the last call until now, in which nothing changed."""
        passed_s = now_s - self._at_s
        self._at_s = now_s
        num_waiting = scheduler.num_waiting
        if num_waiting:
            self.waiting_s += passed_s * num_waiting
            if num_waiting > self.max_waiting:
                self.max_waiting = num_waiting
        self.block_s += passed_s * (self._num_usable_blocks - scheduler.state.cache.pool.num_free_blocks)
        if now_s >= self.next_sample_s:
            self._sample(now_s, scheduler)

    def _busy(self, duration_s: float, num_sequences: int) -> None:
        self.busy_s += duration_s
        self.sequence_steps_s += duration_s * num_sequences
        if num_sequences > self.max_running:
            self.max_running = num_sequences

    def _sample(self, now_s: float, scheduler: Scheduler) -> None:
        self.samples.append(
            Sample(
                now_s,
                sum(1 for _ in scheduler.state.batch.running),
                scheduler.num_waiting,
                self.num_ended,
                scheduler.state.counters.num_generated_tokens,
                kv_usage(scheduler),
            )
        )
        if len(self.samples) > _MAX_SAMPLES:  # double the interval, and drop every second of the earlier samples
            self.samples = self.samples[::2]
            self._interval_s *= 2
        self.next_sample_s = now_s + self._interval_s
