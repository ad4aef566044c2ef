"""Records when each step was planned, sent, computed and committed, to show whether the executor is kept busy.

    planned ─► sent ─► [ on the executor:  queue │ prepare │ forward │ sample ] ─► received ─► committed

Times of the scheduler are readings of time.monotonic_ns(). The executor sends durations, because it has its own clock.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scheduler.core import StepPlan
    from scheduler.core.inspect.step_load import StepLoad

MAX_STEPS = 8192


@dataclass(frozen=True, slots=True)
class ExecutorTimings:
    """Durations of one step, in nanoseconds.

    idle_ns           how long the device was idle before it took this step
    prepare_overlaps  the device computed another step while this one was prepared
    """

    queue_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    prepare_overlaps: bool = False

    @property
    def busy_ns(self) -> int:
        """The time for which this step alone kept the device busy."""
        return self.forward_ns + self.sample_ns + (0 if self.prepare_overlaps else self.prepare_ns)


@dataclass(slots=True)
class StepTrace:
    """The record of one step. Times that have not come yet are 0. `StepLoad` defines the counts of tokens and pairs."""

    epoch: int
    step_id: int
    num_sequences: int
    num_tokens: int
    planned_ns: int
    sent_ns: int = 0
    received_ns: int = 0
    committed_ns: int = 0
    num_decodes: int = 0
    num_decode_pairs: int = 0
    num_prefill_pairs: int = 0
    num_reported: int = 0
    timings: ExecutorTimings = ExecutorTimings()

    @classmethod
    def of_plan(cls, plan: StepPlan, load: StepLoad) -> StepTrace:
        """Returns the trace of a plan that has just been made."""
        return cls(
            plan.epoch,
            plan.step_id,
            plan.num_sequences,
            plan.num_tokens,
            time.monotonic_ns(),
            num_decodes=load.num_decodes,
            num_decode_pairs=load.num_decode_pairs,
            num_prefill_pairs=load.num_prefill_pairs,
            num_reported=load.num_reported,
        )


class StepTraces:
    """Keeps the last steps, oldest first. A step costs a few microseconds and a few hundred bytes."""

    def __init__(self) -> None:
        self._committed: deque[StepTrace] = deque(maxlen=MAX_STEPS)
        self._in_flight: deque[StepTrace] = deque()

    def add(self, trace: StepTrace) -> None:
        """Adds a step that has just been planned."""
        self._in_flight.append(trace)

    def commit_oldest(self, received_ns: int, committed_ns: int, timings: ExecutorTimings) -> StepTrace:
        """Records that the oldest step in flight has been committed, and returns its trace."""
        trace = self._in_flight.popleft()
        trace.received_ns, trace.committed_ns, trace.timings = received_ns, committed_ns, timings
        self._committed.append(trace)
        return trace

    def last_committed(self) -> StepTrace | None:
        """Returns the trace of the step that was committed last."""
        return self._committed[-1] if self._committed else None

    def drop_in_flight(self) -> None:
        """Drops the steps in flight, which will never complete."""
        self._in_flight.clear()

    @property
    def in_flight(self) -> Sequence[StepTrace]:
        """Steps in flight, oldest first."""
        return self._in_flight

    @property
    def begun_ns(self) -> int:
        """The scheduler's estimate of when the oldest step in flight began to compute."""
        planned_ns = self._in_flight[0].planned_ns
        return max(planned_ns, self._committed[-1].received_ns) if self._committed else planned_ns

    def __iter__(self) -> Iterator[StepTrace]:
        """Iterates over the completed steps, oldest first."""
        return iter(self._committed)

    def __reversed__(self) -> Iterator[StepTrace]:
        """Iterates over the completed steps, newest first."""
        return reversed(self._committed)
