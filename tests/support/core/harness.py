"""The test harness: the real scheduler, a fake executor and fake clients. Checks every invariant after every move."""

from collections.abc import Iterator
from itertools import islice
from math import inf

from scheduler.core import (
    Events,
    FinishReason,
    Request,
    Sequence,
    StepPlan,
    StepResult,
)
from scheduler.core.baselines.batching import batch_members
from tests.support.core.checked_scheduler import CheckedScheduler, Flight
from tests.support.core.fake_executor import FakeExecutor


class Harness(CheckedScheduler):
    """Drives the scheduler. Every method passes its effects to executor and clients, and checks all invariants."""

    # --- requests ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Adds a request. Raises CapacityExceeded and QueueFull like the scheduler."""
        self.scheduler.add(request, self.now_s)
        self.arrivals_s[request.request_id] = self.now_s
        self.clients.submit(request)
        self.bound.add(request)
        self.check()

    def cancel(self, request_id: int) -> None:
        self.scheduler.cancel(request_id)
        if request_id in self.clients.requests:
            self.clients.go_away(request_id)
        self.check()

    def stop(self, request_id: int, index: int) -> Events:
        return self._hear(self.scheduler.stop(request_id, index))

    def expire(self, now_s: float) -> Events:
        self.now_s = now_s
        events = self.scheduler.expire(now_s)
        for sequence, reason in events.finished:
            deadline_s = sequence.request.deadline_s
            assert deadline_s is not None
            if reason is FinishReason.TOO_LATE:
                assert sequence.queued_s + self.run_s(sequence) <= deadline_s, f"{sequence!r} has not waited"
                assert deadline_s < now_s + self.run_s(sequence), f"{sequence!r} could end before {deadline_s}"
                assert not self.clients.received[sequence.request.request_id, sequence.index], (
                    f"{sequence!r} has output"
                )
                continue
            assert reason is FinishReason.DEADLINE
            assert deadline_s <= now_s, f"{sequence!r} was due at {deadline_s}, not at {now_s}"
        self._hear(events)
        next_s = self.scheduler.state.deadlines.next_s
        assert next_s is None or next_s > now_s
        return events

    def run_s(self, sequence: Sequence) -> float:
        """Returns the time that a sequence takes by the estimate that the scheduler was told."""
        return self.scheduler.state.run_time.run_s(sequence.request.max_tokens)

    def reset_prefix_cache(self) -> int:
        num_forgotten = self.scheduler.reset_prefix_cache()
        self.check()
        return num_forgotten

    # --- executors --------------------------------------------------------------------------------------------

    def attach(self, num_blocks: int | None = None, *, num_unexecuted: int | None = None) -> Events:
        """Attaches an executor in a new epoch, with `num_blocks` blocks or as many as the last one had.

        num_unexecuted  the executor is the last one, which never executed this many plans; None: it is a new one
        """
        scheduler = self.scheduler
        self.num_blocks = num_blocks or self.num_blocks
        epoch, limits = scheduler.state.epoch + 1, scheduler.state.limits
        executor = FakeExecutor(
            self.num_blocks,
            scheduler.state.cache.block_size,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self.clients.vocab_size,
            epoch,
            self.retains,
        )
        if self.last_executor is not None and num_unexecuted is not None:
            executor = self.last_executor.next_epoch(epoch, num_unexecuted)
        retained = list(executor.digests.items()) if self.retains else None
        self.coverage.num_retained_blocks += len(retained or ())
        events = scheduler.executor_attached(epoch, self.num_blocks, retained)
        for sequence, reason in events.finished:
            if reason is FinishReason.LENGTH:
                self._check_is_beyond(sequence)
            else:
                assert reason is FinishReason.CAPACITY
                assert not self._would_fit(sequence.request), f"{sequence!r} would fit"
        self.coverage.num_narrowed += self.clients.narrow(scheduler.max_tokens_per_sequence)
        self.executor = executor
        return self._hear(events)

    def defer(self, num_samples: int) -> None:
        """Lets the executor not wait for the next tokens of some slots."""
        assert self.executor is not None
        self.executor.num_to_defer = num_samples

    def lose(self) -> Events:
        """Loses the executor with all that is in flight."""
        self.bound.num_losses += 1
        self.coverage.num_lost_flights += len(self.in_flight)
        self.lost += self.in_flight
        self.num_lost_plans = len(self.in_flight)
        self.in_flight.clear()
        self.paused = set()
        self.last_executor, self.executor = self.executor, None
        running = [sequence for sequence in self.scheduler.state.batch.running if not sequence.is_beam]
        events = self.scheduler.executor_lost()
        for sequence, reason in events.finished:
            assert reason is FinishReason.EXECUTORS_LOST
            assert sequence.num_losses > self.scheduler.state.limits.max_losses
        for sequence in running:
            key = (sequence.request.request_id, sequence.index)
            self.losses.lost(key, len(self.clients.received[key]))
            is_cause = self.losses.num_in_a_row(key) > self.scheduler.state.limits.max_losses
            assert is_cause is sequence.is_finished, f"I16: {sequence!r} after its losses in a row"
        self._hear(events)
        for request_id in {sequence.request.request_id for sequence, _ in events.finished}:
            self.cancel(request_id)  # a request fails as a whole, as in the engine
        return events

    # --- steps ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plans a step and executes it; its result stays in flight until `commit`."""
        scheduler = self.scheduler
        waiting = list(scheduler.state.waiting)
        sampling = self._sampling_slots()
        num_preemptions = self._num_group_preemptions()
        members = batch_members(scheduler.state)
        can_plan = self.executor is not None and scheduler.num_in_flight < scheduler.state.limits.max_in_flight
        plan = scheduler.schedule()
        self._check_batch(members, waiting if can_plan else [])
        self.coverage.num_preempted_beams += self._num_group_preemptions() - num_preemptions
        if plan is None:
            self._check_progress_is_possible()
            self.coverage.num_waits_for_room += self.executor is not None and self._waits_for_room()
            self.check()
            return None
        assert self.executor is not None, "a plan without an executor"
        result = self.executor.execute(plan)
        assert (plan.num_sequences, plan.num_tokens) == (self.executor.num_sequences, self.executor.num_tokens)
        self.coverage.num_news += not plan.num_tokens
        self.coverage.num_pipelined += bool(self.in_flight)
        self.coverage.num_overruns += bool(self.executor.num_overruns)
        self.executor.num_overruns = 0
        self.in_flight.append(Flight(plan, result, self.executor.touched_blocks))
        self._check_order(plan, waiting)
        self._check_decodes(plan, sampling)
        is_of_newcomer = self._lets_newcomer_pass(plan)
        self.coverage.num_shortened += self.budget_check.follow(scheduler.state, plan, is_of_newcomer=is_of_newcomer)
        self._observe(waiting)
        self._check_beams(plan)
        self.check()
        return plan

    def commit(self) -> Events:
        """Commits the oldest result in flight."""
        result, counters = self.in_flight.popleft().result, self.scheduler.state.counters
        num_before = counters.num_deferrals
        num_late_beams = len({beam for beam in self._late_beams(result) if not beam.is_finished})
        self.coverage.num_late_beams += num_late_beams
        self.bound.num_deferrals += len(result.deferred) + num_late_beams
        events = self._hear(self.scheduler.commit(result))
        self.coverage.num_deferrals += counters.num_deferrals - num_before
        self._check_usage()
        return events

    def _late_beams(self, result: StepResult) -> Iterator[Sequence]:
        """Yields the beams for whose candidates the executor did not wait, several times."""
        values = iter(result.candidates.values if result.candidates else ())
        for beam in self.scheduler.state.in_flight[0].beams:
            yield from [beam] * sum(value == inf for value in islice(values, beam.params.num_candidates))

    def run(self) -> None:
        """Runs until every request has ended, with as many plans in flight as allowed; checks that nothing leaks."""
        if self.executor is None:
            self.attach()
        while self.scheduler.num_unfinished_requests or self.in_flight:
            if self.schedule() is not None:
                continue
            if self.in_flight:
                self.commit()
            elif (next_s := self.scheduler.next_wake_s) is not None:
                self.expire(next_s)
        self.clients.assert_served()
        self.assert_idle()

    def assert_idle(self) -> None:
        pool = self.scheduler.state.cache.pool
        assert pool.num_free_blocks == pool.num_usable_blocks, "a block was leaked"
        assert self.scheduler.state.batch.num_free_slots == self.scheduler.state.limits.max_num_seqs, (
            "a slot was leaked"
        )

    def _hear(self, events: Events) -> Events:
        self.coverage.num_logprobs += len(events.logprobs)
        self.coverage.num_prompt_logprobs += len(events.prompt_logprobs)
        self.clients.hear(events)
        self.check()
        return events
